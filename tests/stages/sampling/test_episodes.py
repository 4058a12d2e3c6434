"""Rollouts that are episodes: played, stored, scored, judged, and gone on with after a kill."""

import dataclasses
import json
import math
from collections import Counter

import numpy as np
import pytest

from rlhf.stages import base as base_model
from rlhf.stages import evaluate, rollout
from rlhf.stages.common.compilation import configure_jax
from rlhf.stages.common.journal import read_lines
from rlhf.stages.sampling.environment import Environment
from rlhf.stages.sampling.episode_tables import summary, turns_summary
from rlhf.stages.sampling.episodes import EnvironmentFailed
from rlhf.stages.score import stage as score
from rlhf.stages.score.settings import ENVIRONMENT, Reward
from rlhf.tuning.agents.contract import Task
from rlhf.tuning.agents.rows import TrajectoryRow, TurnRow
from rlhf.tuning.agents.trajectory import Ended, Episode, Turn, trajectory_row
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.chat.renderer import Renderer
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.rows import CompletionRow, ScoreRow, VerdictRow, names_of, write_table
from tests.stages.training.support import data, ids, perform, rows

TASKS, SAMPLES = 3, 4
GUESS = Environment(name="guess", arguments={"high": 4, "guesses": 3}, turns=3, max_tokens=400, processes=8)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A random base model and three tasks."""
    configure_jax()
    folder, memory = tmp_path_factory.mktemp("episodes"), {}
    _, base = perform(base_model, base_model.Config(source="random:tiny"), folder / "base", memory)
    tasks = [
        {"id": f"g{i}", "prompt_ids": ids("guess", end=False), "prompt": f"guess {i}", "answer": None,
         "metadata": json.dumps({"seed": i})}
        for i in range(TASKS)
    ]  # fmt: skip
    made = data(folder / "data", prompts=tasks, heldout=tasks)
    return {"folder": folder, "memory": memory, "policy": base, "tokenizer": base, "data": made}


def assert_same(found, expected):
    """Rows that differ by the rounding of log-probabilities at most."""
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        if hasattr(mine, "logprobs"):
            np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-5)
            mine, other = (dataclasses.replace(row, logprobs=[]) for row in (mine, other))
        assert mine == other


def played(inputs, name, environment=GUESS, **changes):
    config = rollout.Config(prompts=TASKS, completions=SAMPLES, max_tokens=3, environment=environment, **changes)
    artifacts = {n: inputs[n] for n in ("data", "policy", "tokenizer")}
    return perform(rollout, config, inputs["folder"] / name, inputs["memory"], **artifacts)


@pytest.fixture(scope="module")
def made(inputs):
    return dict(zip(("metrics", "artifact"), played(inputs, "played"), strict=True))


@pytest.mark.slow
def test_an_episode_begins_with_the_messages_of_its_prompt(inputs):
    asked = [{"role": "system", "content": "Answer in French."}, {"role": "user", "content": "What is 2+2?"}]
    task = {"id": "a", "prompt_ids": ids("asked", end=False), "prompt": "system: ...", "answer": None}
    rows_of = [task | {"metadata": json.dumps({"prompt_messages": asked})}]
    made = data(inputs["folder"] / "conversation", prompts=rows_of, heldout=rows_of)
    now = "tests.stages.sampling.games:now"
    environment = Environment(tools=[now], tool_format="llama", turns=1, max_tokens=512, processes=4)
    _, artifact = played({**inputs, "data": made}, "conversations", environment)
    for episode in rows(artifact, "trajectories", TrajectoryRow):
        first = json.loads(episode.conversation)[: len(asked)]
        assert [message["role"] for message in first] == ["system", "user"]
        assert "Answer in French." in first[0]["content"] and first[1]["content"] == "What is 2+2?"


def test_a_prompt_with_values_of_its_own_for_the_template_is_refused(inputs):
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    task = {"id": "a", "prompt_ids": ids("asked", end=False), "prompt": "q", "answer": None}
    rows_of = [task | {"metadata": json.dumps(options)}]
    made = data(inputs["folder"] / "options", prompts=rows_of, heldout=rows_of)
    with pytest.raises(ValueError, match="prompt a has chat_template_kwargs.* base.chat_template_kwargs"):
        played({**inputs, "data": made}, "with-options")


@pytest.mark.slow
def test_every_task_has_its_episodes_and_each_has_an_end(made):
    episodes = rows(made["artifact"], "trajectories", TrajectoryRow)
    assert names_of(episodes) == [(place, sample) for place in range(TASKS) for sample in range(SAMPLES)]
    assert Counter(e.status for e in episodes) == made["metrics"]["statuses"]
    assert {e.status for e in episodes} == {"done"}
    assert all(e.success == (e.reward == 1) for e in episodes)


@pytest.mark.slow
def test_the_trained_ids_are_the_sampled_ids_and_nothing_else_is(made):
    """Id by id: the rollout row is the turns one after another, with holes where nobody sampled (R3, R27)."""
    turns: dict[tuple[int, int], list[TurnRow]] = {}
    for row in rows(made["artifact"], "turns", TurnRow):
        turns.setdefault((row.place, row.sample), []).append(row)
    table = rows(made["artifact"], "rollouts", CompletionRow)
    assert set(turns) == set(names_of(table))
    renderer = Renderer(byte_tokenizer())
    for row in table:
        mine = turns[row.place, row.sample]
        assert [t.turn for t in mine] == list(range(len(mine)))
        sampled = [math.isfinite(p) for p in row.logprobs]
        assert [i for i, s in zip(row.token_ids, sampled, strict=True) if s] == [i for t in mine for i in t.token_ids]
        # The observations' ids are those of the renderer, and stand where the turns say.
        expected = []
        for t in mine[:-1]:
            assert row.token_ids[t.start : t.start + len(t.token_ids)] == t.token_ids
            assert t.observation_ids == renderer.suffix(json.loads(t.observation), t.stop == "eos")
            expected += [*t.token_ids, *t.observation_ids]
        assert row.token_ids == [*expected, *mine[-1].token_ids]


def test_lengths_are_of_what_the_policy_sampled(made):
    """No token of an observation: a policy does not grow where its environment says more."""
    episodes, metrics = rows(made["artifact"], "trajectories", TrajectoryRow), made["metrics"]
    assert any(e.observed_tokens for e in episodes)
    assert metrics["tokens"] == sum(e.sampled_tokens for e in episodes)
    assert metrics["mean_length"] == metrics["tokens"] / len(episodes)


def test_a_group_is_a_task_and_the_environment_rewards_it(inputs, made):
    config = score.Config(rewards={ENVIRONMENT: Reward(function=ENVIRONMENT)}, workers=1)
    _, scores = perform(score, config, inputs["folder"] / "score", inputs["memory"], rollouts=made["artifact"])
    scored = rows(scores, "scores", ScoreRow)
    episodes = rows(made["artifact"], "trajectories", TrajectoryRow)
    assert [s.total for s in scored] == [e.reward for e in episodes]
    found = RoundData.from_rows(rows(made["artifact"], "rollouts", CompletionRow), scored)
    assert found.groups_N.tolist() == [place for place in range(TASKS) for _ in range(SAMPLES)]


@pytest.mark.slow
def test_what_a_kill_leaves_is_gone_on_with_and_is_the_same(inputs, made):
    """Half of the journal, cut off in a line: those episodes are not played again, and all tables are equal."""
    once = inputs["folder"] / "played" / "work" / "episodes.jsonl"
    lines = once.read_text().splitlines(keepends=True)
    again = inputs["folder"] / "again" / "work" / "episodes.jsonl"
    again.parent.mkdir(parents=True, exist_ok=True)
    # A changed byte, and a line that is cut off.
    lines[2] = lines[2].replace('"reward": ', '"reward": 1')
    again.write_text("".join(lines[:6]) + lines[6][:40])
    with again.open("ab") as file:
        file.write(b"\n" + b"[" * 100_000 + b"\n\xff\xfe")
    _, artifact = played(inputs, "again")
    for part, kind in (("rollouts", CompletionRow), ("turns", TurnRow), ("trajectories", TrajectoryRow)):
        assert_same(rows(artifact, part, kind), rows(made["artifact"], part, kind))
    assert len(list(read_lines(again))) == TASKS * SAMPLES


@pytest.mark.slow
def test_alone_is_as_among_others(inputs, made):
    """One episode at a time gives the tables of eight at a time (R15)."""
    _, artifact = played(inputs, "alone", GUESS.model_copy(update={"processes": 1}))
    assert_same(rows(artifact, "rollouts", CompletionRow), rows(made["artifact"], "rollouts", CompletionRow))


@pytest.mark.slow
def test_in_lockstep_they_have_the_same_bits_each_time(inputs):
    """Two makings agree in every bit, and in all but rounding with episodes that went each at its own pace."""
    together = GUESS.model_copy(update={"lockstep": True})
    first, second = (played(inputs, f"together-{n}", together)[1] for n in range(2))
    assert repr(rows(first, "rollouts", CompletionRow)) == repr(rows(second, "rollouts", CompletionRow))


@pytest.mark.slow
def test_an_environment_that_fails_leaves_the_statistics_and_too_many_end_the_stage(inputs):
    flaky = Environment(name="tests.stages.sampling.games:Flaky", turns=2, max_tokens=300, processes=4)
    with pytest.raises(
        EnvironmentFailed, match=r"4 of 12 episodes .* \(environment.max_failed_fraction\).*g1: .*step 1"
    ):
        played(inputs, "flaky", flaky)
    metrics, artifact = played(inputs, "flakier", flaky.model_copy(update={"max_failed_fraction": 0.5}))
    episodes = rows(artifact, "trajectories", TrajectoryRow)
    assert [e.place for e in episodes if e.status == "failed"] == [1] * SAMPLES
    assert all(e.reward is None and e.success is None and e.tries == 2 for e in episodes if e.place == 1)
    assert metrics["failed_episodes"] == SAMPLES and metrics["success"] == 1.0
    ended = [e.sampled_tokens for e in episodes if e.status != "failed"]
    assert metrics["mean_length"] == sum(ended) / len(ended)
    config = score.Config(rewards={ENVIRONMENT: Reward(function=ENVIRONMENT)}, workers=1)
    _, scores = perform(score, config, inputs["folder"] / "flaky-score", inputs["memory"], rollouts=artifact)
    assert [s.total for s in rows(scores, "scores", ScoreRow)] == [1.0] * 4 + [None] * 4 + [1.0] * 4


def test_an_evaluation_plays_the_held_out_tasks_and_tells_what_chance_reaches(inputs):
    config = evaluate.Config(samples=2, max_tokens=3, judge=ENVIRONMENT, environment=GUESS)
    artifacts = {n: inputs[n] for n in ("data", "policy", "tokenizer")}
    metrics, artifact = perform(evaluate, config, inputs["folder"] / "evaluate", inputs["memory"], **artifacts)
    verdicts = rows(artifact, "verdicts", VerdictRow)
    episodes = rows(artifact, "trajectories", TrajectoryRow)
    assert [v.score for v in verdicts] == [float(e.success) for e in episodes]
    assert metrics["score"] == pytest.approx(sum(v.score for v in verdicts) / len(verdicts))
    assert metrics["mean_length"] == sum(e.sampled_tokens for e in episodes) / len(episodes)
    # Three guesses find any of the three hidden numbers blindly.
    assert metrics["levels"] == {"random": pytest.approx(1 - 0.75**3), "blind": 1.0, "optimal": 1.0, "exact": True}


@pytest.mark.slow
def test_limits_have_statuses_of_their_own(inputs):
    def statuses(name, **changes):
        _, artifact = played(inputs, name, GUESS.model_copy(update=changes))
        table = rows(artifact, "rollouts", CompletionRow)
        return {e.status for e in rows(artifact, "trajectories", TrajectoryRow)}, {row.stop for row in table}

    assert statuses("turn-limit", turns=1) <= ({"turn_limit", "done"}, {"length", "eos"})
    found, stops = statuses("token-limit", max_tokens=60)
    assert "token_limit" in found and "length" in stops


@pytest.mark.parametrize(("tokens", "room"), [(20, 20), (1024, 512)], ids=["the setting", "the model"])
def test_a_first_context_without_room_for_a_turn_names_the_setting(inputs, tokens, room):
    changes = {"max_tokens": tokens, "system_prompt": "Be brief. " * 60}
    told = rf"the first context has \d+ tokens, and environment.max_tokens and the model allow {room}: raise max_tokens"
    with pytest.raises(EnvironmentFailed, match=told):
        played(inputs, f"short-{tokens}", GUESS.model_copy(update=changes))
    # None was sampled.
    ends = [values for _, _, values in read_lines(inputs["folder"] / f"short-{tokens}" / "work" / "episodes.jsonl")]
    assert [(e["status"], e["turns"]) for e in ends] == [("failed", [])] * TASKS * SAMPLES


@pytest.mark.slow
def test_tools_alone_give_no_reward_where_an_environment_gives_0(inputs):
    """What is right is said by reward functions: an episode is no failure because a tool rewards nothing."""
    now = "tests.stages.sampling.games:now"
    alone = Environment(tools=[now], tool_format="llama", turns=1, max_tokens=512, processes=4)
    metrics, artifact = played(inputs, "tools", alone)
    episodes = rows(artifact, "trajectories", TrajectoryRow)
    assert {e.status for e in episodes} == {"done"}
    assert {(e.reward, e.success) for e in episodes} == {(None, None)} and metrics["success"] is None
    assert {t.reward for t in rows(artifact, "turns", TurnRow)} == {None} and metrics["calling"] == 0.0


def turn(place: int, number: int, *failures: bool, valid: bool = True) -> TurnRow:
    """A turn with a call for each of `failures`."""
    calls = json.dumps([{"name": "look", "failed": failed} for failed in failures]) if failures else None
    more = {"token_ids": [1], "logprobs": [-1.0], "text": "", "stop": "eos"}
    return TurnRow(place=place, sample=0, turn=number, start=0, valid=valid, calls=calls, **more)


def episode(status: str, *rewards: float | None, told: bool | None = None, place: int = 0):
    """The row of an episode whose turns got these rewards, and whose last one told a success."""
    turns = [Turn(0, [1], [-1.0], "", "eos", reward=reward) for reward in rewards]
    turns[-1].success = told
    reason = "lost" if status == "failed" else None
    return trajectory_row(Ended(Episode(place, 0, "p", Task(1, {})), [1], turns, status, reason, 1, [], 0.0))


def test_calls_are_counted_by_episode_and_their_failures_by_call(tmp_path):
    turns = [turn(0, 0, False, True), turn(0, 1), turn(1, 0, False), turn(2, 0, valid=False)]
    # An episode without a result is in no share.
    turns += [turn(3, n, True, valid=False) for n in range(4)]
    write_table(tmp_path / "part-00000.parquet", turns, TurnRow.schema())
    episodes = [episode("failed" if place == 3 else "done", 1.0, place=place) for place in range(4)]
    assert turns_summary(tmp_path, False, episodes) == {"valid_turns": 0.75, "calling": 2 / 3, "failed_calls": 1 / 3}


def test_without_a_call_it_matters_whether_there_are_tools(tmp_path):
    write_table(tmp_path / "part-00000.parquet", [turn(0, 0)], TurnRow.schema())
    found = [turns_summary(tmp_path, tools, [episode("done", 1.0)]) for tools in (True, False)]
    assert found == [{"valid_turns": 1.0, "calling": 0.0, "failed_calls": None}, {"valid_turns": 1.0}]


def test_no_turns_say_nothing(tmp_path):
    write_table(tmp_path / "part-00000.parquet", [], TurnRow.schema())
    assert turns_summary(tmp_path, True, []) == {}


@pytest.mark.parametrize(
    ("status", "rewards", "told", "success", "guessed"),
    [
        ("done", (0.0, 1.0), None, True, True),
        # What was paid for a form or a step, in an episode that was lost or cut.
        ("done", (0.1, 0.0), None, False, True),
        ("done", (1.0, -1.0), None, False, True),
        ("turn_limit", (0.1, 0.1), None, False, True),
        ("truncated", (1.0, 1.0), None, False, True),
        # What was paid for each step before the goal.
        ("done", (-1.0, -1.0, 1.0), None, True, True),
        ("done", (1.0,), False, False, False),
        ("turn_limit", (0.0,), True, True, False),
        ("done", (None,), None, None, False),
        ("failed", (1.0,), None, None, False),
    ],
)
def test_success_is_what_the_environment_says_else_a_guess_by_the_end(status, rewards, told, success, guessed):
    row = episode(status, *rewards, told=told)
    assert (row.success, row.success_guessed) == (success, guessed)


def test_a_share_of_successes_that_were_guessed_is_said_to_be_so():
    told, guess = episode("done", 1.0, told=True), episode("done", 0.0)
    assert summary([told, guess])["success"] == 0.5 and summary([told, guess])["success_guessed"] is True
    assert "success_guessed" not in summary([told, episode("done", None), episode("failed", 1.0)])

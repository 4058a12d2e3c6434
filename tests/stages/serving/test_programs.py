"""Programs that speak to an OpenAI URL are agents: their calls become trajectories, their failures are their own."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlhf.stages.sampling.environment import Environment, modules_of, source_digests
from rlhf.stages.serving import programs, sessions
from rlhf.stages.serving.programs import play_episodes, reward_of, without_answers
from rlhf.tuning.agents.contract import Task
from rlhf.tuning.agents.play import turn_seed
from rlhf.tuning.agents.trajectory import Episode, completion_rows, from_values, to_line, trajectory_row, turn_rows
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.live import EngineStopped
from rlhf.tuning.rollout.requests import Request, Sampling
from rlhf.tuning.rollout.servers import keeper
from rlhf.tuning.rollout.servers.protocol import ServerLost
from rlhf.tuning.rollout.servers.streaming import Turns
from rlhf.tuning.rows import PromptRow, by_trajectory
from tests.stages.serving.support import CONFIG, LIMITS, QUESTION, RESULT, STOPS, TOKENIZER, conversation
from tests.support import until

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PLAIN = Environment(
    agent=["python", str(HERE / "plain_agent.py")], turns=3, tries=2, processes=4, max_tokens=150, agent_grades=True
)
# The taught model is sure of what it says; a high temperature tells seeds apart.
HOT = 4.0


@pytest.fixture(scope="module")
def engine(params):
    engine = Engine(CONFIG, limits=LIMITS, top=5)
    engine.load(params)
    return engine


def play(engine, tasks, settings=PLAIN, temperature=1.0):
    episodes = [Episode(place, 0, f"task {place}", Task(place, row)) for place, row in enumerate(tasks)]
    tokens = settings.max_tokens
    made = list(play_episodes(settings, engine, TOKENIZER, STOPS, "digest", tokens, 80, temperature, 7, episodes))
    assert engine.idle
    return sorted(made, key=lambda ended: ended.episode.place)


@pytest.fixture(scope="module")
def made(engine):
    kinds = ("two_turns", "fork", "crash", "silent", "wrong", "many", "long", "two_turns")
    return list(zip(kinds, play(engine, [{"do": kind, "answer": "5"} for kind in kinds], temperature=HOT), strict=True))


def test_how_programs_end_is_how_their_episodes_end(made):
    assert [(kind, e.status, e.reward, e.success, e.tries, len(e.turns)) for kind, e in made] == [
        ("two_turns", "done", 0.25, True, 1, 2),
        ("fork", "done", 2.0, False, 1, 3),
        ("crash", "failed", None, None, 2, 1),
        ("silent", "failed", None, None, 2, 0),
        ("wrong", "failed", None, None, 2, 1),
        ("many", "turn_limit", 0.0, False, 1, 3),
        ("long", "token_limit", -1.0, False, 1, 1),
        ("two_turns", "done", 0.25, True, 1, 2),
    ]
    reasons = {kind: e.reason for kind, e in made}
    assert reasons["crash"].endswith("ended with status 1: it broke")
    assert "made no call" in reasons["silent"]
    assert 'expected {"reward": NUMBER' in reasons["wrong"]


def test_turns_are_drawn_by_the_episodes_names_whatever_the_client_asks(made, engine):
    """Seed and temperature are the stage's: each turn is the engine's answer to the recorded ids."""
    for place in (0, 7):
        ended, before = made[place][1], list(made[place][1].context)
        for number, turn in enumerate(ended.turns):
            seed = turn_seed(7, place, 0, number)
            [(_, [alone])] = engine.run([Request(before, 4, Sampling(HOT), STOPS, seed)])
            assert alone.tokens == turn.token_ids
            assert alone.logps == pytest.approx(turn.logprobs, abs=1e-5)
            before += [*turn.token_ids, *turn.observation_ids]
    assert made[0][1].turns[0].token_ids != made[7][1].turns[0].token_ids


def test_forks_are_parts_and_tables_agree(made):
    ended = dict(made)["fork"]
    rows = completion_rows(ended, PromptRow(id="task 1", prompt_ids=[1], prompt="p"), "digest", 7, 1.0)
    [parts] = by_trajectory(rows)
    # The fork is before the row that goes on: rewards read the last row, and so the last turn.
    assert [turn.part for turn in ended.turns] == [1, 0, 1]
    assert parts[-1].text == ended.turns[-1].text != parts[0].text
    for turn in turn_rows(ended, "digest"):
        at = slice(turn.start, turn.start + len(turn.token_ids))
        assert parts[turn.part].token_ids[at] == turn.token_ids
        assert parts[turn.part].logprobs[at] == turn.logprobs
        behind = parts[turn.part].token_ids[at.stop :][: len(turn.observation_ids)]
        assert behind == turn.observation_ids
    assert [sum(map(math.isfinite, row.logprobs)) for row in rows] == [
        sum(len(turn.token_ids) for turn in ended.turns if turn.part == part) for part in (0, 1)
    ]
    observed = sum(len(row.prompt_ids) + sum(map(math.isnan, row.logprobs)) for row in rows)
    assert trajectory_row(ended).observed_tokens == observed
    assert [message["role"] for message in ended.conversation] == ["user", "assistant", "user", "assistant"]
    place, sample, values = json.loads(to_line(ended))
    assert (place, sample, from_values(values, ended.episode)) == (1, 0, ended)


@pytest.mark.parametrize("grades", [False, True])
def test_a_command_of_the_policy_gets_neither_answer_nor_secrets_nor_the_key_of_the_reward(
    engine, tmp_path, monkeypatch, grades
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-worker")
    settings = PLAIN.model_copy(update={"agent_grades": grades, "tries": 1})
    gold = {"answer": "gold-42", "answers": ["gold-42"], "tests": ["assert f() == 'gold-42'"]}
    # Of verl's data, also as text, and of reasoning-gym.
    tool = {"calc": {"create_kwargs": {"ground_truth": "gold-42"}}}
    gold |= {"extra_info": {"index": 1, "parts": [{"answer": "gold-42"}], "tools_kwargs": tool}}
    gold |= {"text": json.dumps(gold["extra_info"]), "list": '[{"ground_truth": "gold-42"}]'}
    gold |= {"entry": {"expression": "gold-42"}}
    [ended] = play(engine, [{"do": "stolen", "file": str(tmp_path / "seen"), **gold}], settings)
    assert (ended.status, ended.reward, ended.success) == ("done", None, None)
    seen = json.loads((tmp_path / "seen").read_text())
    assert (seen["statuses"], seen["opened"]) == ([403, 403], [])
    assert "gold-42" not in str(seen) and "of-the-worker" not in str(seen)


def test_what_is_no_answer_reaches_the_program():
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    row = {"tools": [{"function": {"name": "submit", "parameters": schema}}], "text": "[1,  2]", "open": '{"x"'}
    row |= {"schema": json.dumps(schema, indent=1), "deep": "[" * 100_000}
    prose = ["[Easy] Write a function; it must pass the tests.", "{x | x > 3}: what is the answer?"]
    any_of = {"type": ["object", "null"], "properties": {"answer": {"type": "string"}}}
    row |= {"prose": prose, "any_of": any_of, "untyped": {"properties": schema["properties"], "required": ["answer"]}}
    assert without_answers(row) == row
    hidden = ["{'ground_truth': '42'}", '{"answer": 1}\n{"answer": 2}', {"properties": {"p": {"answer": "42"}}}]
    hidden += [{"type": "object", "properties": {"answer": "42"}}]
    emptied = ["", "", {"properties": {"p": {}}}, {"type": "object", "properties": {}}]
    assert without_answers(hidden) == emptied


def test_a_program_that_grades_gets_answers_of_any_size(engine):
    settings = PLAIN.model_copy(update={"agent_grades": True, "tries": 1})
    large = {"tests": ["x" * 2**20], "answer": "4"}
    read, unread = play(engine, [{"do": "fork", **large}, {"do": "two_turns", **large}], settings)
    assert (read.status, read.reward, read.success) == ("done", 2, True)
    assert (unread.status, unread.reward, unread.success) == ("done", 0.25, True)


def test_nothing_is_sampled_outside_of_a_session(engine):
    """It would have none of an episode's limits, no record, and the engine's time of all others."""
    [ended] = play(engine, [{"do": "outside"}], PLAIN.model_copy(update={"tries": 1}))
    assert (ended.status, ended.reward, len(ended.turns)) == ("done", 2.0, 1)


class Lost:
    """Servers that are lost a moment after a request."""

    def check(self, request):
        pass

    def run(self, requests):
        # The engine has made a step by then.
        time.sleep(0.3)
        raise ServerLost("http://host:8000 was lost 4 times")


def test_lost_servers_end_the_stage_and_are_named():
    """They are no fault of programs, whose episodes would be content."""
    with pytest.raises(EngineStopped, match="http://host:8000 was lost 4 times"):
        play(Turns(Lost(), 4), [{"do": "two_turns"}] * 2, PLAIN.model_copy(update={"tries": 1}))


def test_programs_that_ignore_errors_do_not_hold_a_stage_whose_engine_has_failed(tmp_path):
    began = time.monotonic()
    tasks = [{"do": "ignore", "pids": str(tmp_path / str(place))} for place in range(2)]
    with pytest.raises(EngineStopped, match="http://host:8000 was lost 4 times"):
        play(Turns(Lost(), 4), tasks, PLAIN.model_copy(update={"episode_seconds": 200.0, "tries": 2}))
    assert time.monotonic() - began < 150


def test_a_program_may_end_its_own_session(engine):
    settings = PLAIN.model_copy(update={"agent_grades": True, "tries": 1})
    [ended] = play(engine, [{"do": "delete", "answer": "4"}], settings)
    assert (ended.status, ended.reward, len(ended.turns)) == ("done", 1.0, 1)


def test_a_keeper_ends_at_once_where_processes_of_its_command_have_ended(tmp_path):
    command = [sys.executable, "-S", keeper.__file__, "sh", "-c", "for i in 1 2 3; do sh -c 'true &'; done; sleep 60 &"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        began = time.monotonic()
        assert process.wait(60) == 0 and time.monotonic() - began < keeper.GRACE_SECONDS


def test_a_deadline_ends_a_program_with_all_that_it_started(engine, tmp_path):
    pids = tmp_path / "pids"
    settings = PLAIN.model_copy(update={"episode_seconds": 4.0, "tries": 1})
    [ended] = play(engine, [{"do": "hang", "pids": str(pids)}], settings)
    assert (ended.status, ended.reward) == ("failed", None)
    assert "took longer than 4 s" in ended.reason
    # One in the program's group, and one in a session of its own.
    assert len(started := pids.read_text().split()) == 2
    until(lambda: not any(psutil.pid_exists(int(pid)) for pid in started), 10)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
def test_a_program_that_takes_more_memory_than_allowed_fails(engine):
    settings = PLAIN.model_copy(update={"megabytes": 128, "tries": 1})
    less, more = play(engine, [{"do": "large", "megabytes": megabytes} for megabytes in (16, 256)], settings)
    assert (less.status, less.reward) == ("done", 16 * 2**20)
    assert (more.status, more.reward) == ("failed", None)
    assert more.reason.startswith("crash of the program: ") and more.reason.endswith("status 1: MemoryError")


def test_a_program_that_is_not_there_is_told(engine):
    settings = PLAIN.model_copy(update={"agent": ["no-such-program"], "tries": 1})
    [ended] = play(engine, [{}], settings)
    assert ended.status == "failed" and "no-such-program" in ended.reason.partition(":")[2]
    assert "not found" in ended.reason or "No such file" in ended.reason


def test_through_an_engine_that_only_answers_requests_an_episode_is_the_same(made, engine):
    """As HTTP servers do: each turn is a request of its own."""
    [ended] = play(Turns(engine, 1), [{"do": "two_turns"}], temperature=HOT)
    assert [turn.token_ids for turn in ended.turns] == [turn.token_ids for turn in made[0][1].turns]
    assert (ended.status, ended.reward) == ("done", 0.25)


def test_a_program_that_cannot_be_started_is_a_failure_of_its_own(engine):
    settings = PLAIN.model_copy(update={"tries": 1})
    [ended] = play(engine, [{"do": "two_turns", "text": "x" * 2**20}], settings)
    assert (ended.status, ended.turns) == ("failed", [])
    assert "cannot be started" in ended.reason


def test_an_unchanged_program_of_openais_sdk_is_an_agent(engine):
    pytest.importorskip("openai")
    settings = PLAIN.model_copy(update={"agent": [sys.executable, str(HERE / "openai_agent.py")]})
    [ended] = play(engine, [{"prompt": QUESTION["content"]}], settings, temperature=0.0)
    first, call, between, answer = conversation()
    assert (ended.status, ended.reward, ended.context) == ("done", 1.0, first)
    assert [turn.token_ids for turn in ended.turns] == [call, answer]
    assert ended.turns[0].observation_ids == between
    assert ended.turns[0].calls == [{"name": "add", "arguments": {"a": 2, "b": 3}, "result": RESULT["content"]}]


def test_results_are_those_of_the_calls_that_they_name():
    called = [{"id": one, "function": {"name": "weather", "arguments": f'{{"city": "{one}"}}'}} for one in ("a", "b")]
    call = sessions.Call(0, None, "chat", [1], [], (), None, reply={"tool_calls": called})
    for given, told in (
        (["b", "a"], ["first", "zeroth"]),
        (["x", "y"], ["zeroth", "first"]),
        (["b"], [None, "zeroth"]),
    ):
        texts = ["zeroth", "first"]
        messages = [
            {"role": "tool", "tool_call_id": one, "content": text} for one, text in zip(given, texts, strict=False)
        ]
        found = programs._tool_calls(call, sessions.Call(1, call, "chat", [2], messages, (), None))
        assert [one["result"] for one in found] == told
    assert found[0]["arguments"] == {"city": "a"}


def test_the_last_line_is_the_reward_only_if_it_is_one():
    assert reward_of(["{", '{"reward": 1}']) == (1.0, None)
    for lines in ([], ["done"], ["{}"], ['{"a":' * 20_000]):
        assert reward_of(lines) == (None, None)
    for line in ("true}", "NaN}", '1, "success": "yes"}', f"1{'0' * 400}}}"):
        with pytest.raises(ValueError, match="expected"):
            reward_of([f'{{"reward": {line}'])


def test_a_program_is_part_of_the_key_and_not_beside_environments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text("a")
    before = source_digests(Environment(agent=["python", "agent.py"]))
    Path("agent.py").write_text("b")
    assert list(before) == ["file:agent.py"] != source_digests(Environment(agent=["python", "agent.py"]))
    assert before != source_digests(Environment(agent=["python", "agent.py"]))
    assert "rlhf.stages.serving.programs" in modules_of(Environment(agent=["python", "agent.py"]))
    assert "rlhf.stages.serving.programs" not in modules_of(Environment(name="guess"))
    with pytest.raises(ValueError, match=r"there is no file other.py"):
        source_digests(Environment(agent=["python", "other.py"]))
    with pytest.raises(ValueError, match="name is not for an agent"):
        Environment(agent=["python", "agent.py"], name="guess")

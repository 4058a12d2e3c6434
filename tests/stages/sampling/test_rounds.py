"""A round of more prompts than there are: places tell its completions apart from the rollout to the update (R21)."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages import base as base_model
from stages import greedy, rollout, score
from stages.common.compilation import configure_jax
from stages.sampling.groups import chosen_groups, read_scored
from tests.stages.training.support import Folder, data, ids, perform
from tuning.algorithms.round_data import RoundData
from tuning.rows import CompletionRow, ScoreRow, names_of, read_table

PROMPTS, COMPLETIONS = 5, 2
QUESTIONS = ["1+1=", "some words?", "2*3="]


def value(prompts, completions, **_):
    """A number of its own for each text."""
    return [sum((i + 1) * ord(c) for i, c in enumerate(text)) / 1000 for text in completions]


def rows(folder: Folder, part, kind):
    return read_table(sorted(folder.local(part).glob("*.parquet")), kind)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A random base model and three prompts."""
    configure_jax()
    folder, memory = tmp_path_factory.mktemp("round"), {}
    _, base = perform(base_model, base_model.Config(source="random:tiny"), folder / "base", memory)
    table = [
        {"id": f"p{i}", "prompt_ids": ids(text, end=False), "prompt": text, "answer": str(i), "metadata": "{}"}
        for i, text in enumerate(QUESTIONS)
    ]
    return {"folder": folder, "memory": memory, "base": base, "prompts": data(folder / "data", prompts=table)}


@pytest.fixture(scope="module")
def made(inputs):
    """The rollouts and scores of one round."""
    folder, memory = inputs["folder"], inputs["memory"]
    policy = {"policy": inputs["base"], "tokenizer": inputs["base"]}
    config = rollout.Config(prompts=PROMPTS, completions=COMPLETIONS, max_tokens=4, shard_prompts=2)
    found = {}
    metrics, found["rollouts"] = perform(rollout, config, folder / "rollout", memory, data=inputs["prompts"], **policy)
    assert metrics["completions"] == PROMPTS * COMPLETIONS
    rewards = score.Config(rewards={"v": score.Reward(function=f"{__name__}:value")}, shard_completions=4, workers=1)
    scored = lambda name, of: perform(score, rewards, folder / name, memory, rollouts=of)[1]  # noqa: E731
    found["scores"] = scored("score", found["rollouts"])
    return found


def test_places_number_the_prompts_of_the_round(made):
    table = rows(made["rollouts"], "rollouts", CompletionRow)
    assert names_of(table) == [(place, sample) for place in range(PROMPTS) for sample in range(COMPLETIONS)]
    drawn = [table[COMPLETIONS * place].prompt_id for place in range(PROMPTS)]
    # Five of three: some are there twice, with other completions.
    assert len(set(drawn)) == 3
    twice = [tuple(row.token_ids) for row in table if row.prompt_id == max(drawn, key=drawn.count)]
    assert len(twice) == len(set(twice)) == 2 * COMPLETIONS


def test_each_completion_has_its_own_reward(made):
    table, scores = rows(made["rollouts"], "rollouts", CompletionRow), rows(made["scores"], "scores", ScoreRow)
    assert names_of(scores) == names_of(table)
    assert [s.total for s in scores] == pytest.approx(value(None, [r.text for r in table]), rel=1e-6)
    assert len({s.total for s in scores}) == len(scores)


def test_a_journal_that_a_kill_has_left_gives_the_same_scores(made, inputs):
    source = inputs["folder"] / "score"
    again = inputs["folder"] / "again"
    (again / "work").mkdir(parents=True)
    lines = (source / "work" / "journal-v.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == PROMPTS * COMPLETIONS
    # The kill came while the seventh line was written, before the second shard.
    (again / "work" / "journal-v.jsonl").write_text("".join(lines[:6]) + lines[6][:5])
    config = score.Config(rewards={"v": score.Reward(function=f"{__name__}:value")}, shard_completions=4, workers=1)
    _, scores = perform(score, config, again, inputs["memory"], rollouts=made["rollouts"])
    assert rows(scores, "scores", ScoreRow) == rows(made["scores"], "scores", ScoreRow)


def test_groups_and_baselines_are_those_of_places(made):
    scored = read_scored({"rollouts": made["rollouts"], "scores": made["scores"]})
    assert scored.prompts == PROMPTS
    asked = greedy.prompts_by_place(scored.rollouts)
    assert [(place, prompt.id) for place, prompt in asked] == list(
        dict.fromkeys((row.place, row.prompt_id) for row in scored.rollouts)
    )
    best = [ScoreRow(place=place, prompt_id=prompt.id, total=10.0 + place) for place, prompt in asked][::-1]
    found = RoundData.from_rows(scored.rollouts, scored.scores, best)
    assert found.groups_N.tolist() == [place for place in range(PROMPTS) for _ in range(COMPLETIONS)]
    assert found.greedy_N.tolist() == [10 + row.place for row in scored.rollouts]
    taken, about = chosen_groups(scored, "stop")
    assert taken == scored
    assert about == {"prompts_sampled": PROMPTS, "prompts_without_signal": 0, "prompts_to_spare": 0}


def test_tables_of_other_completions_are_refused(made, inputs):
    """Scores that name another place, and a completion that is there twice."""
    table = rows(made["rollouts"], "rollouts", CompletionRow)
    scores = rows(made["scores"], "scores", ScoreRow)
    with pytest.raises(ValueError, match="the same completions"):
        RoundData.from_rows(table, scores[::-1])
    with pytest.raises(ValueError, match="each once"):
        RoundData.from_rows(table + table[:1], scores + scores[:1])
    wrong = inputs["folder"] / "wrong"
    (wrong / "scores").mkdir(parents=True)
    columns = pq.read_table(made["scores"].local("scores/part-00000.parquet"))
    moved = columns.set_column(0, "place", pa.array([p + 1 for p in columns["place"].to_pylist()], pa.int64()))
    pq.write_table(moved, wrong / "scores" / "a.parquet")
    given = {"rollouts": made["rollouts"], "scores": Folder(wrong, "wrong")}
    with pytest.raises(RuntimeError, match="do not list the same completions"):
        read_scored(given)
    twice = {"refill_1": made["rollouts"], "refill_1_scores": made["scores"]}
    with pytest.raises(RuntimeError, match="one place and sample"):
        read_scored({"rollouts": made["rollouts"], "scores": made["scores"], **twice})

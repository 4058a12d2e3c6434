"""A round of more prompts than there are: places tell its completions apart from the rollout to the update (R21)."""

import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf.stages import base as base_model
from rlhf.stages import evaluate, greedy, rollout
from rlhf.stages.common.compilation import configure_jax
from rlhf.stages.sampling import rows as rows_module
from rlhf.stages.sampling.groups import chosen_groups, read_scored
from rlhf.stages.score import stage as score
from rlhf.stages.score.settings import Reward
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.models.tokenizer import save_tokenizer
from rlhf.tuning.rows import CompletionRow, RefusedRow, ScoreRow, names_of
from tests.stages.score.functions import weighed
from tests.stages.serving.chats import tokenizer
from tests.stages.support import context
from tests.stages.training.support import Folder, data, ids, perform, rows

PROMPTS, COMPLETIONS = 8, 2
QUESTIONS = ["1+1=", "some words?", "2*3=", "far too long " * 500]
# Two passes over the four prompts, in each of which the last is refused.
PLACES = [0, 2, 3, 4, 5, 6]
WEIGHED = Reward(function="tests.stages.score.functions:weighed")
REWARDS = score.Config(rewards={"v": WEIGHED}, shard_completions=4, workers=1)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A random base model and four prompts."""
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
    metrics, rollouts = perform(rollout, config, folder / "rollout", memory, data=inputs["prompts"], **policy)
    scores = perform(score, REWARDS, folder / "score", memory, rollouts=rollouts)[1]
    return {"metrics": metrics, "rollouts": rollouts, "scores": scores}


@pytest.mark.slow
def test_places_number_the_prompts_of_the_round(made):
    table = rows(made["rollouts"], "rollouts", CompletionRow)
    assert names_of(table) == [(place, sample) for place in PLACES for sample in range(COMPLETIONS)]
    # Each of three is there twice, with other completions.
    assert Counter(row.prompt_id for row in table) == {f"p{i}": 2 * COMPLETIONS for i in range(3)}
    assert len({tuple(row.token_ids) for row in table}) == len(table)


def test_refused_prompts_have_places_and_reasons_and_the_counts_add_up(made):
    table, refused = rows(made["rollouts"], "rollouts", CompletionRow), rows(made["rollouts"], "refused", RefusedRow)
    tokens = len(ids(QUESTIONS[3], end=False))
    reason = rf"{tokens} tokens and 4 new ones exceed the model's \d+ positions"
    assert sorted([row.place for row in refused] + PLACES) == list(range(PROMPTS))
    assert {row.prompt_id for row in refused} == {"p3"}
    assert all(re.fullmatch(reason, row.reason) for row in refused)
    # Sampled are the prompts that were not refused, each completion with one score.
    assert made["metrics"]["refused_prompts"] == len(refused) == 2
    assert made["metrics"]["completions"] == len(table) == (PROMPTS - len(refused)) * COMPLETIONS
    assert Counter(names_of(rows(made["scores"], "scores", ScoreRow))) == Counter(names_of(table))


def test_a_round_whose_prompts_are_all_refused_says_so(inputs, tmp_path):
    (path,) = inputs["prompts"].local("prompts/").glob("*.parquet")
    (tmp_path / "data" / "prompts").mkdir(parents=True)
    pq.write_table(pq.read_table(path).slice(3), tmp_path / "data" / "prompts" / path.name)
    given = {"policy": inputs["base"], "tokenizer": inputs["base"], "data": Folder(tmp_path / "data", "long")}
    with pytest.raises(ValueError, match="every prompt of the round is too long, as p3"):
        perform(rollout, rollout.Config(max_tokens=4), tmp_path / "rollout", inputs["memory"], **given)


def test_each_completion_has_its_own_reward(made):
    table, scores = rows(made["rollouts"], "rollouts", CompletionRow), rows(made["scores"], "scores", ScoreRow)
    assert names_of(scores) == names_of(table)
    assert [s.total for s in scores] == pytest.approx(weighed(None, [r.text for r in table]), rel=1e-6)
    assert len({s.total for s in scores}) == len(scores)


def test_a_journal_that_a_kill_has_left_gives_the_same_scores(made, inputs):
    source = inputs["folder"] / "score"
    again = inputs["folder"] / "again"
    (again / "work").mkdir(parents=True)
    lines = (source / "work" / "journal-v.jsonl").read_text().strip().splitlines(keepends=True)
    assert len(lines) == len(PLACES) * COMPLETIONS
    # The kill came while the seventh line was written, before the second shard.
    (again / "work" / "journal-v.jsonl").write_text("".join(lines[:6]) + lines[6][:5])
    _, scores = perform(score, REWARDS, again, inputs["memory"], rollouts=made["rollouts"])
    assert rows(scores, "scores", ScoreRow) == rows(made["scores"], "scores", ScoreRow)


def test_groups_and_baselines_are_those_of_places(made):
    scored = read_scored({"rollouts": made["rollouts"], "scores": made["scores"]})
    assert scored.prompts == len(PLACES)
    asked = greedy.prompts_by_place(scored.rollouts)
    assert [(place, prompt.id) for place, prompt in asked] == list(
        dict.fromkeys((row.place, row.prompt_id) for row in scored.rollouts)
    )
    best = [ScoreRow(place=place, prompt_id=prompt.id, total=10.0 + place) for place, prompt in asked][::-1]
    found = RoundData.from_rows(scored.rollouts, scored.scores, best)
    assert found.groups_N.tolist() == [group for group in range(len(PLACES)) for _ in range(COMPLETIONS)]
    assert found.greedy_N.tolist() == [10 + row.place for row in scored.rollouts]
    taken, about = chosen_groups(scored, "stop")
    assert taken == scored
    assert about == {"prompts_sampled": len(PLACES), "prompts_without_signal": 0, "prompts_to_spare": 0}


def test_tables_of_other_completions_are_refused(made, inputs):
    """Scores that name another place, and a completion that is there twice."""
    table = rows(made["rollouts"], "rollouts", CompletionRow)
    scores = rows(made["scores"], "scores", ScoreRow)
    with pytest.raises(ValueError, match="the same completions"):
        RoundData.from_rows(table, scores[::-1])
    with pytest.raises(ValueError, match="two completions have one name"):
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
    with pytest.raises(RuntimeError, match="the same place and sample"):
        read_scored({"rollouts": made["rollouts"], "scores": made["scores"], **twice})


def test_a_text_that_ends_completions_leaves_their_tokens_as_they_are_up_to_it(inputs, made):
    whole = rows(made["rollouts"], "rollouts", CompletionRow)
    stop = next(c for row in whole for c in row.text[1:] if c.isascii())
    config = rollout.Config(prompts=PROMPTS, completions=COMPLETIONS, max_tokens=4, shard_prompts=2, stop=["no", stop])
    policy = {"policy": inputs["base"], "tokenizer": inputs["base"]}
    _, cut = perform(rollout, config, inputs["folder"] / "stopped", inputs["memory"], data=inputs["prompts"], **policy)
    ends = set()
    for full, row in zip(whole, rows(cut, "rollouts", CompletionRow), strict=True):
        ends.add(row.stop)
        count = len(row.token_ids)
        assert list(row.token_ids) == list(full.token_ids)[:count]
        np.testing.assert_allclose(row.logprobs, list(full.logprobs)[:count], atol=1e-6)
        assert row.text == full.text.partition(stop)[0] and (row.stop == "string") == (stop in full.text)
    assert "string" in ends


def test_a_text_is_without_each_control_token_whatever_its_role(tmp_path):
    made, folder = tokenizer("llama3"), Folder(tmp_path, "base")
    save_tokenizer(made, tmp_path / "tokenizer")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    ctx = context(rollout.Config(), tmp_path, inputs={"tokenizer": folder})
    said = made.encode("5<|start_header_id|>user<|end_header_id|>6<|eot_id|></s>", add_special_tokens=False)
    assert rows_module._Sampler(ctx, rows_module.Draw(1, 4, 1.0, 1), [])._text(said) == "5user6"


def test_an_evaluation_draws_from_the_tokens_that_it_is_restricted_to(inputs):
    problems = [{"id": "h", "prompt_ids": ids("1+1=", end=False), "prompt": "1+1=", "answer": "2", "metadata": "{}"}]
    held = data(inputs["folder"] / "held", heldout=problems)
    policy = {"policy": inputs["base"], "tokenizer": inputs["base"], "data": held}
    found = {}
    for name, value in {"temperature": 0.0, "top_k": 1, "top_p": 1e-6, "min_p": 1.0, "samples": 2}.items():
        config = evaluate.Config(**{"samples": 2, "max_tokens": 4, "workers": 1, name: value})
        _, out = perform(evaluate, config, inputs["folder"] / f"by-{name}", inputs["memory"], **policy)
        found[name] = [list(row.token_ids) for row in rows(out, "rollouts", CompletionRow)]
    greedy = found.pop("temperature")
    assert greedy != found.pop("samples")
    assert all(tokens == greedy for tokens in found.values())


def test_texts_that_end_completions_are_for_the_engine_in_the_worker():
    with pytest.raises(ValueError, match="stop is for the native engine in the worker, not for vllm servers"):
        rollout.Config(stop=["a"], engine={"kind": "vllm", "url": "http://h:1", "version": "1", "folder": "f"})
    with pytest.raises(ValueError, match="top_p"):
        evaluate.Config(top_p=0.0)
    with pytest.raises(ValueError, match="stop"):
        evaluate.Config(stop=[""])

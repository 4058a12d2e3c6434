"""What has not ended in a round goes on in the next as if nothing had been between: nothing lost, nothing twice."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tracemalloc
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages import base as base_model
from stages import partial, rollout
from stages.common.compilation import configure_jax
from stages.contract.definition import Context
from stages.sampling import carried as carried_module
from stages.sampling.carried import Going, Group, spread
from stages.sampling.native import open_engine
from tests.stages.training.support import Folder, data, ids, perform
from tuning.columns import Numbers
from tuning.device import choose
from tuning.models.huggingface import load_decoder
from tuning.rollout.segments import SegmentRow
from tuning.rows import CompletionRow, read_table
from tuning.training.completions import token_logps

PROMPTS, COMPLETIONS, MAX, TOKENS = 3, 3, 12, 4
SIZES = {"prompts": PROMPTS, "completions": COMPLETIONS, "max_tokens": MAX, "shard_prompts": 2, "order_seed": 5}
QUESTIONS = ["1+1=", "some words?", "2*3=", "more, and a comma", "7-", "x", "yes or no", "far"]
STOPS = list(range(40, 55))
"""Further ids that end a completion: a random model draws one of them within a few tokens."""
ROUNDS = 3


def rows(folder: Folder, part, kind=CompletionRow):
    return read_table(sorted(folder.local(part).glob("*.parquet")), kind)


def segments(folder: Folder):
    """The segments of each completion by place and sample, in order."""
    found: dict[tuple[int, int], list[SegmentRow]] = {}
    for row in sorted(rows(folder, "segments", SegmentRow), key=lambda row: row.number):
        found.setdefault((row.place, row.sample), []).append(row)
    return found


def by_origin(folder: Folder, part="rollouts"):
    """The rows of a table by (round in which they began, place there, sample)."""
    first = {name: of_name[0] for name, of_name in segments(folder).items()}
    names = [(first[row.place, row.sample], row) for row in rows(folder, part)]
    return {(one.began, one.began_at, row.sample): row for one, row in names}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Two random policies, a tokenizer with many stop ids, and prompts."""
    configure_jax()
    folder = tmp_path_factory.mktemp("carried")
    found = {"folder": folder, "memory": {}}
    _, first = perform(base_model, base_model.Config(source="random:tiny"), folder / "first", found["memory"])
    _, second = perform(base_model, base_model.Config(source="random:tiny"), folder / "second", found["memory"], seed=8)
    shutil.copytree(first.path, folder / "tokenizer")
    config = json.loads((folder / "tokenizer/model/config.json").read_text())
    (folder / "tokenizer/model/config.json").write_text(json.dumps(config | {"eos_token_id": STOPS}))
    table = [
        {"id": f"p{i}", "prompt_ids": ids(text, end=False), "prompt": text, "answer": str(i), "metadata": "{}"}
        for i, text in enumerate(QUESTIONS)
    ]
    found |= {"first": first, "second": second, "tokenizer": Folder(folder / "tokenizer", "tokenizer")}
    return found | {"data": data(folder / "data", prompts=table)}


def made_round(inputs, name, number, policy, carried=None, **settings):
    """Round `number` of the stage, as an artifact, with its metrics; `name` is its folder."""
    config = partial.Config(**(SIZES | {"round": number, "carried": carried is not None} | settings))
    given = {"policy": inputs[policy], "tokenizer": inputs["tokenizer"], "data": inputs["data"]}
    given |= {"carried": carried} if carried is not None else {}
    return perform(partial, config, inputs["folder"] / name, inputs["memory"], seed=100 + number, **given)


def rounds(inputs, name, policies, staleness=0, **settings):
    """The artifacts of the rounds, with their metrics; the last one gives completions all that is left of them."""
    made: list = []
    for number, policy in enumerate(policies):
        tokens = {"round_tokens": TOKENS if number + 1 < len(policies) else None, "max_lag": 9}
        tokens |= {"lag": min(number, staleness)}
        carried = made[-1][1] if made else None
        made.append(made_round(inputs, f"{name}/{number}", number, policy, carried, **(tokens | settings)))
    return made


@pytest.fixture(scope="module")
def same(inputs):
    """Rounds of one policy."""
    return rounds(inputs, "same", ["first"] * ROUNDS)


@pytest.fixture(scope="module")
def other(inputs):
    """Rounds that alternate between two policies, which are an update old from the second on."""
    return rounds(inputs, "other", ["first", "second", "first"], staleness=1)


def test_a_carried_completion_is_the_one_that_is_sampled_in_one_round(inputs, same):
    found = {name: row for _, folder in same for name, row in by_origin(folder).items()}
    for number in range(ROUNDS):
        given = {"policy": inputs["first"], "tokenizer": inputs["tokenizer"], "data": inputs["data"]}
        place = inputs["folder"] / f"whole/{number}"
        config = rollout.Config(**SIZES, round=number)
        _, whole = perform(rollout, config, place, inputs["memory"], seed=100 + number, **given)
        for row in rows(whole, "rollouts"):
            mine = found.pop((number, row.place, row.sample))
            assert (mine.token_ids, mine.stop, mine.seed) == (row.token_ids, row.stop, row.seed)
            assert (mine.prompt_id, mine.text) == (row.prompt_id, row.text)
            np.testing.assert_allclose(mine.logprobs, row.logprobs, atol=1e-5)
    assert not found
    # Some were in all of the rounds, some ended at once, and some had to wait for their groups.
    lengths = [len(of_one) for _, folder in same for of_one in segments(folder).values()]
    assert {1, 2, 3} <= set(lengths)
    waiting = [row for _, folder in same for row in rows(folder, "carried") if row.stop != "carried"]
    assert waiting
    # Text is made once, where rewards read it.
    assert not any(row.text for _, folder in same for row in rows(folder, "carried"))


def test_every_completion_is_trained_on_once_with_its_whole_group(same):
    trained = Counter(name for _, folder in same for name in by_origin(folder))
    expected = [(r, p, s) for r in range(ROUNDS) for p in range(PROMPTS) for s in range(COMPLETIONS)]
    assert trained == Counter(expected)
    for metrics, folder in same:
        table = rows(folder, "rollouts")
        assert Counter(row.place for row in table) == dict.fromkeys({row.place for row in table}, COMPLETIONS)
        assert not {row.place for row in table} & {row.place for row in rows(folder, "carried")}
        assert metrics["completions"] == len(table) and metrics["carried"] == len(rows(folder, "carried"))
        # One file would hold all tokens of a round, of which Arrow allows 2^31.
        for part in ("rollouts", "carried", "segments"):
            files = sorted(folder.local(part).glob("*.parquet"))
            places = [set(pq.read_table(file)["place"].to_pylist()) for file in files]
            assert all(len(of_file) <= SIZES["shard_prompts"] for of_file in places)
            assert sum(map(len, places)) == len(set().union(*places))
    assert not rows(same[-1][1], "carried")
    # Sampled tokens are counted in the round that sampled them.
    all_tokens = sum(len(row.token_ids) for _, folder in same for row in rows(folder, "rollouts"))
    assert sum(metrics["tokens"] for metrics, _ in same) == all_tokens


def test_what_a_round_draws_does_not_depend_on_what_is_carried(inputs, same):
    alone, _ = made_round(inputs, "alone", 1, "first", round_tokens=TOKENS)
    drawn = {row.place: row.prompt_id for row in rows(same[1][1], "rollouts") + rows(same[1][1], "carried")}
    mine = inputs["folder"] / "alone/out"
    table = rows(Folder(mine, ""), "rollouts") + rows(Folder(mine, ""), "carried")
    assert {row.place: row.prompt_id for row in table} == {p: drawn[p] for p in range(PROMPTS)}
    assert alone["completions"] + alone["carried"] == PROMPTS * COMPLETIONS


def test_each_token_has_the_log_probability_of_the_policy_that_its_segment_names(inputs, other):
    device = choose("float32")
    logps = {}
    table = [(row, segments(folder)[row.place, row.sample]) for _, folder in other for row in rows(folder, "rollouts")]
    for name in ("first", "second"):
        config, params = load_decoder(inputs[name].local("model"))
        pairs = [(list(row.prompt_ids), list(row.token_ids)) for row, _ in table]
        found = token_logps(config, params, pairs, 1.0, device.compute, device.row_tokens_per_step)
        logps[inputs[name].digest] = found
    several = 0
    for i, (row, of_row) in enumerate(table):
        expected = np.concatenate([np.full(one.tokens, j) for j, one in enumerate(of_row)] if of_row else [[]]).astype(
            int
        )
        mine = [logps[of_row[j].policy][i][t] for t, j in enumerate(expected)]
        np.testing.assert_allclose(row.logprobs, mine, atol=1e-4)
        several += len({one.policy for one in of_row}) > 1
        assert [one.round for one in of_row] == list(range(of_row[0].began, of_row[0].began + len(of_row)))
        assert row.policy == of_row[-1].policy
    assert several > 3
    # The two differ by far more than what was compared.
    apart = [np.abs(np.subtract(a, b)).max() for a, b in zip(*logps.values(), strict=True)]
    assert np.median(apart) > 0.01


def test_lags_are_those_of_the_tokens(other):
    for number, (metrics, folder) in enumerate(other):
        trained = [one for row in rows(folder, "rollouts") for one in segments(folder)[row.place, row.sample]]
        assert all(one.version == max(0, one.round - 1) for one in trained)
        lags = [number - max(0, one.round - 1) for one in trained for _ in range(one.tokens)]
        assert metrics["lag"] == pytest.approx(np.mean(lags)) and metrics["lag_max"] == max(lags)
    assert [metrics["lag_max"] for metrics, _ in other] == [0, 1, 2] and other[-1][0]["lag"] > 1


def test_a_group_that_would_become_too_old_runs_to_its_end(inputs):
    made = rounds(inputs, "bound", ["first"] * ROUNDS, max_lag=1)
    assert [metrics["lag_max"] for metrics, _ in made] == [0, 1, 1]
    (_, folder) = made[1]
    assert {one.began for name, (one, *_) in segments(folder).items() if name[0] >= PROMPTS} == {0}
    assert all(row.place < PROMPTS for row in rows(folder, "carried"))
    # With a policy that is one update old there is one round less in which it can go on.
    _, stale = made_round(inputs, "stale", 1, "first", made[0][1], round_tokens=TOKENS, max_lag=1, lag=1)
    assert not rows(stale, "carried")
    assert {one.version for one in rows(stale, "segments", SegmentRow)} == {0}


def test_completions_that_run_to_their_end_are_begun_first(inputs, same, monkeypatch):
    asked: list = []

    def opened(ctx, engine, quantize, context, requests):
        asked.extend(requests)
        return open_engine(ctx, engine, quantize, context, requests)

    monkeypatch.setattr(carried_module, "open_engine", opened)
    made_round(inputs, "longest-first", 1, "first", same[0][1], round_tokens=TOKENS, max_lag=1, shard_prompts=9)
    lengths = [request.max_tokens for request in asked]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1] == TOKENS
    # Among others the order of the table stays.
    fresh = [request.counter for request in asked if not request.begun]
    assert fresh == sorted(fresh)


def test_a_group_is_as_old_as_its_oldest_tokens_which_need_not_be_the_first(inputs):
    """As in a fork that raises the staleness: what a group gets after it is older than what it has."""
    sizes = {"round_tokens": 2, "max_lag": 3}
    _, before = made_round(inputs, "older-1", 1, "first", **sizes)
    _, behind = made_round(inputs, "older-2", 2, "second", before, lag=2, **sizes)
    going_on = {row.place for row in rows(behind, "carried")} & set(range(PROMPTS, 2 * PROMPTS))
    assert {one.version for one in rows(behind, "segments", SegmentRow) if one.place in going_on} == {0, 1}
    _, last = made_round(inputs, "older-3", 3, "second", behind, lag=2, **sizes)
    versions = {place: [] for place in {row.place for row in rows(last, "carried")}}
    for one in rows(last, "segments", SegmentRow):
        versions.get(one.place, []).append(one.version)
    # The next round trains on nothing that is more than three updates old.
    assert versions and min(version for of_one in versions.values() for version in of_one) >= 4 - 3
    # Tokens that would be too old in the next round are no reason to go on there.
    _, ended = made_round(inputs, "older-4", 2, "second", before, lag=2, round_tokens=2, max_lag=2)
    assert not rows(ended, "carried")


def test_a_round_without_a_whole_group_runs_the_oldest_to_its_end(inputs):
    short = {"round_tokens": 1, "max_lag": 9}
    _, first = made_round(inputs, "first-1", 0, "first", **short)
    assert {row.place for row in rows(first, "rollouts")} == {0}
    assert [len(of_one) for of_one in segments(first).values()] == [1] * PROMPTS * COMPLETIONS
    metrics, second = made_round(inputs, "first-2", 1, "second", first, **short)
    (place,) = {row.place for row in rows(second, "rollouts")}
    assert place >= PROMPTS and {name[:2] for name in by_origin(second)} == {(0, 1)}
    assert metrics["groups"] == 1 and metrics["lag_max"] == 1


def test_a_round_goes_on_from_its_shards(inputs, other):
    kept = inputs["folder"] / "other/1"
    again = inputs["folder"] / "again"
    (again / "work").mkdir(parents=True)
    shutil.copytree(kept / "work/rollouts-00000", again / "work/rollouts-00000")
    _, folder = made_round(inputs, "again", 1, "second", other[0][1], round_tokens=TOKENS, max_lag=9, lag=1)
    for part in ("rollouts", "carried", "segments"):
        mine, theirs = ({f.name: f.read_bytes() for f in one.local(part).glob("*")} for one in (folder, other[1][1]))
        assert mine == theirs


def test_steps_do_not_go_by_age(same):
    def groups(*ages):
        return [Group(rows=(), segments={}, began=age, began_at=i, version=age) for i, age in enumerate(ages)]

    def order(*ages):
        return [(group.began, group.began_at) for group in spread(groups(*ages))]

    # Each half, and each quarter, has what all of them have.
    assert order(2, 2, 2, 2, 1, 1, 0, 0) == [(2, 0), (1, 4), (0, 6), (2, 1), (2, 2), (1, 5), (0, 7), (2, 3)]
    assert order(1, 1, 1) == [(1, 0), (1, 1), (1, 2)] and order() == []
    _, folder = same[-1]
    began = {place: one.began for (place, _), (one, *_) in segments(folder).items()}
    places = list(dict.fromkeys(row.place for row in rows(folder, "rollouts")))
    ages = [began[place] for place in places]
    assert len(places) == len(began) and sorted(ages) != ages != sorted(ages, reverse=True)


def test_requests_of_what_goes_on_have_no_object_for_each_token(inputs, same):
    count = 100_000
    row = rows(same[0][1], "carried")[0]
    group = Group((dataclasses.replace(row, token_ids=Numbers(np.ones(count, np.int32))),), {}, 0, 0, 0)
    config = partial.Config(**SIZES | {"max_tokens": 2 * count})
    ctx = Context(
        config=config, inputs={"tokenizer": inputs["tokenizer"]}, out=inputs["folder"], work=inputs["folder"], seed=0,
        progress=lambda *a, **k: None, log=print, memory=inputs["memory"],
    )  # fmt: skip
    going = Going(ctx, config, [group], 1, oldest=0)
    tracemalloc.start()
    request = going._request(group, group.rows[0], 1)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 5 * count and request.begun == count
    assert request.prompt == [*row.prompt_ids, *[1] * count]


def test_segments_that_are_not_the_tokens_are_refused(inputs, same):
    wrong = inputs["folder"] / "wrong"
    shutil.copytree(same[0][1].path, wrong)
    carried = {row.place for row in rows(same[0][1], "carried")}
    (file, *_) = [f for f in wrong.glob("segments/*") if carried & set(pq.read_table(f)["place"].to_pylist())]
    table = pq.read_table(file)
    tokens = [n + (p in carried) for n, p in zip(table["tokens"].to_pylist(), table["place"].to_pylist(), strict=True)]
    at = table.column_names.index("tokens")
    pq.write_table(table.set_column(at, "tokens", pa.array(tokens, pa.int64())), file)
    with pytest.raises(RuntimeError, match=r"somewhere: place \d, sample 0 has \d tokens, its segments \d; expected"):
        made_round(inputs, "refused", 1, "first", Folder(wrong, "wrong"))


def test_a_round_whose_prompts_are_too_long_goes_on_with_what_is_carried(inputs, same):
    table = [
        {
            "id": "long",
            "prompt_ids": ids("far too long " * 500, end=False),
            "prompt": "l",
            "answer": "",
            "metadata": "{}",
        }
    ]
    long = data(inputs["folder"] / "long-data", prompts=table)
    metrics, _ = made_round(inputs | {"data": long}, "long", 1, "first", same[0][1])
    assert metrics["refused_prompts"] == PROMPTS and metrics["completions"] == len(rows(same[0][1], "carried"))
    with pytest.raises(ValueError, match="every prompt of the round is too long"):
        made_round(inputs | {"data": long}, "long-alone", 1, "first")

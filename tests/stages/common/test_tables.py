"""Tables: a shard is kept from the moment it ends, and rows are read by number and column in the order of the files."""

import types

import pytest

from rlhf.stages.common.tables import (
    Shards,
    as_they_end,
    batches,
    by_shard,
    count_rows,
    first_rows,
    read_table,
    rows_at,
)
from rlhf.stages.common.trained_prompts import prompts_among, trained_names
from rlhf.stages.refill import unusable
from rlhf.stages.sampling.order import prompts_of_refill
from rlhf.tuning.rows import PromptRow, RefusedRow, write_table
from tests.stages.gate.support import Lab
from tests.stages.training.support import Folder

SHARDS = Shards("things", RefusedRow, RefusedRow.schema(), 3, "things")


class Killed(Exception):
    """Stands for a kill between two shards."""


@pytest.fixture
def ctx(tmp_path):
    told = []
    return types.SimpleNamespace(
        work=tmp_path,
        told=told,
        log=told.append,
        saved=lambda: None,
        progress=lambda *done: told.append(done),
        is_primary=True,
    )


def row(item):
    return RefusedRow(place=item, prompt_id=f"p{item}", reason="")


def places(rows):
    return [r.place for r in rows]


def test_shards_that_end_before_earlier_ones_are_kept_and_only_the_others_are_made_again(ctx):
    asked = []

    def make(missing):
        asked.append(list(missing))
        for number in (2, 0):
            yield number, [row(i) for i in missing[number]]
        raise Killed

    with pytest.raises(Killed):
        as_they_end(ctx, SHARDS, range(8), make)
    assert sorted(p.parent.name for p in ctx.work.rglob("*.parquet")) == ["things-00000", "things-00002"]
    ctx.told.clear()

    rows, files = as_they_end(ctx, SHARDS, range(8), lambda missing: ((n, map_rows(p)) for n, p in missing.items()))
    assert asked == [[0, 1, 2]] and places(rows) == list(range(8)) and len(files) == 3
    assert ctx.told == [(5, 8, "things"), (8, 8, "things"), "resumed: 2 of 3 shards of things were there"]


def map_rows(items):
    return [row(i) for i in items]


def test_one_after_the_other_gives_the_same_table(ctx):
    made = []

    def make(items):
        made.append(list(items))
        return map_rows(items)

    assert places(by_shard(ctx, SHARDS, range(8), make)[0]) == list(range(8))
    assert made == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert places(by_shard(ctx, SHARDS, range(8), make)[0]) == list(range(8)) and len(made) == 3


@pytest.fixture
def prompts(tmp_path):
    """Twelve prompts of 0 to 11 tokens in three files."""
    rows = [PromptRow(id=f"p{i}", prompt_ids=list(range(300, 300 + i)), prompt=f"question {i}") for i in range(12)]
    for number in range(3):
        some = rows[4 * number : 4 * number + 4]
        write_table(tmp_path / "prompts" / f"part-{number}.parquet", some, PromptRow.schema())
    return Folder(tmp_path, "data")


def test_the_first_rows_are_read_with_their_columns_alone(prompts):
    assert first_rows(prompts, "prompts/", 5, ("id", "prompt")) == [
        {"id": f"p{i}", "prompt": f"question {i}"} for i in range(5)
    ]
    assert len(first_rows(prompts, "prompts/", 99, ("id",))) == 12


def test_rows_of_a_number_are_those_of_the_whole_table(prompts):
    table = read_table(prompts, "prompts/", PromptRow)
    assert rows_at(prompts, "prompts/", PromptRow, [7, 0, 11]) == [table[7], table[0], table[11]]
    assert rows_at(prompts, "prompts/", PromptRow, []) == []
    assert (
        count_rows(prompts, "prompts/") == len(table) == sum(b.num_rows for b in batches(prompts, "prompts/", ("id",)))
    )


def test_a_refill_draws_no_prompt_that_the_round_has_or_that_is_too_long(prompts):
    total, used = unusable(prompts, {"p0", "p3", "p9"}, room=8)
    assert (total, used) == (12, {0, 3, 9, 10, 11})
    assert sorted(prompts_of_refill(9, total, 0, 5, used)) == [1, 2, 4, 5, 6, 7, 8]
    assert unusable(prompts, set(), room=float("inf")) == (12, set())


@pytest.fixture
def rounds(tmp_path):
    """Policies of two rounds, each with prompts of its own; and makes the choice of one of them."""
    lab = Lab(tmp_path)
    one = lab.commit("rewarded", {"policy.json": "one"}, {"data": lab.data(1, ["a", "b"])})
    two = lab.commit("rewarded", {"policy.json": "two"}, {"data": lab.data(1, ["c"]), "policy": one})

    def choice(number):
        inputs = {"candidate_000": one, "candidate_001": two, "evaluation_000": lab.commit("evaluate", {"of": "one"})}
        return lab.commit("select", {"policy.json": "chosen"}, inputs, metrics={"round": number})

    return one, two, choice


def test_the_best_of_several_rounds_was_trained_on_what_its_round_and_those_before_it_saw(rounds):
    one, two, choice = rounds
    assert trained_names(choice(0)) == trained_names(one) and prompts_among(trained_names(one)) == 2
    assert trained_names(choice(1)) == trained_names(two) and prompts_among(trained_names(two)) == 3

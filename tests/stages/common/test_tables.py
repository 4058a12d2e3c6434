"""Shards of a stage's work: each is kept from the moment it ends, in whatever order they end."""

import types

import pytest

from rlhf.stages.common.tables import Shards, as_they_end, by_shard
from rlhf.tuning.rows import RefusedRow

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

"""Parquet tables of a stage: read by rows and columns, written at once or by shards, from which a stage goes on after
a kill."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.stages.contract.definition import Context
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning import multihost, rows

Item = TypeVar("Item")
R = TypeVar("R", bound=rows.Row)


def read_rows(artifact: Artifact, part: str) -> list[dict[str, Any]]:
    """All rows of the Parquet files below `part`, in file order, as dictionaries: for tables of any kind."""
    return [row for path in _files(artifact, part) for row in pq.read_table(path).to_pylist()]


def first_rows(artifact: Artifact, part: str, count: int, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The first rows of `read_rows`, with some columns, for display. Later rows are not read."""
    every = (pq.ParquetFile(path) for path in _files(artifact, part))
    found = (batch.to_pylist() for file in every for batch in file.iter_batches(max(1, count), columns=list(columns)))
    return list(itertools.islice(itertools.chain.from_iterable(found), count))


def read_table(artifact: Artifact, part: str, kind: type[R], columns: Collection[str] = ()) -> list[R]:
    """The rows of the Parquet files below `part`, in file order; arguments as of `rlhf.tuning.rows.read_table`."""
    return rows.read_table(_files(artifact, part), kind, columns)


def _files(artifact: Artifact, part: str) -> list[Path]:
    return sorted(artifact.local(part).glob("*.parquet"))


def table_paths(data: Artifact, part: str) -> list[Path]:
    """Local paths of the tables of a part of prepared data, in order. Of a remote store its arrays are not fetched."""
    return sorted(data.local(f"{part}/part-").parent.glob("part-*.parquet"))


def batches(artifact: Artifact, part: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Some columns of all rows below `part`, in file order: pieces that fit memory whatever the table's size is."""
    for path in _files(artifact, part):
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(columns=list(columns))


def count_rows(artifact: Artifact, part: str) -> int:
    """The rows of the Parquet files below `part`, of which none is read."""
    return sum(pq.read_metadata(path).num_rows for path in _files(artifact, part))


def rows_at(artifact: Artifact, part: str, kind: type[R], numbers: Sequence[int]) -> list[R]:
    """The rows of these numbers, counted from 0 over the files, in the order of the numbers. Others are not kept."""
    return rows.read_rows_at(_files(artifact, part), kind, numbers)


def write_rows(path: Path, table: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    """One Parquet file of dictionaries, which is visible only when it is complete."""
    rows.write_arrow(path, pa.Table.from_pylist(list(table), schema=schema))


@dataclasses.dataclass(frozen=True)
class Shards(Generic[R]):
    """How the work of a stage is divided: each finished shard is a file in `ctx.work`, which outlives a kill."""

    name: str
    """Of the table: the folder of its files."""
    kind: type[R]
    schema: pa.Schema
    size: int
    """Items of a shard."""
    unit: str
    """The name of an item in progress lines."""


def by_shard(
    ctx: Context,
    shards: Shards[R],
    items: Sequence[Item],
    make: Callable[[Sequence[Item]], list[R]],
) -> tuple[list[R], list[Path]]:
    """All rows that `make` gives for slices of `items`, and the files of the slices; on process 0 of a group alone.

    Slices that an earlier try has finished are read, not made.
    """
    return as_they_end(ctx, shards, items, lambda missing: ((n, make(part)) for n, part in missing.items()))


def as_they_end(
    ctx: Context,
    shards: Shards[R],
    items: Sequence[Item],
    make: Callable[[dict[int, Sequence[Item]]], Iterable[tuple[int, list[R]]]],
    dealt: int = 0,
) -> tuple[list[R], list[Path]]:
    """As `by_shard`. `make` gets all missing slices by number and gives (number, rows) of each, in any order.

    dealt: items that each process of a group makes in its turn, with as many rows of each; 0: all make all together.
    """
    total = -(-len(items) // shards.size)
    # The name has the number of shards: after a change of their size none is taken for another.
    files = [
        ctx.work / f"{shards.name}-{number:05d}" / f"part-{number:05d}-of-{total:05d}.parquet"
        for number in range(total)
    ]
    found: dict[int, list[R]] = {}
    if ctx.is_primary:
        # The work folder has removed damaged shards.
        found = {n: rows.read_table([path], shards.kind) for n, path in enumerate(files) if path.exists()}
    slices = {n: items[n * shards.size : (n + 1) * shards.size] for n in range(total)}
    there = multihost.from_primary(lambda: sorted(found))
    missing = {n: part for n, part in slices.items() if n not in there}
    kept, done = len(there), sum(len(slices[n]) for n in there)
    if kept:
        ctx.progress(done, len(items), shards.unit)
    made: Iterable[tuple[int, list[R]]] = ()
    if missing:
        made = _shared(shards, missing, make, dealt) if dealt else make(missing)
    for number, new_rows in made:
        if ctx.is_primary:
            rows.write_table(files[number], new_rows, shards.schema)
            ctx.saved()
            found[number] = new_rows
        done += len(slices[number])
        ctx.progress(done, len(items), shards.unit)
    if kept:
        ctx.log(f"resumed: {kept} of {total} shards of {shards.name} were there")
    return [row for number in range(total) for row in found.get(number, ())], files


def _shared(
    shards: Shards[R],
    missing: Mapping[int, Sequence[Item]],
    make: Callable[[dict[int, Sequence[Item]]], Iterable[tuple[int, list[R]]]],
    dealt: int,
) -> Iterator[tuple[int, list[R]]]:
    """As `make`: each process makes the items that are dealt to it, and process 0 yields the slices once they are
    whole."""
    index = multihost.process_index()
    turns = itertools.count()
    owners = {n: [next(turns) // dealt % multihost.process_count() for _ in part] for n, part in missing.items()}
    own = {n: [item for item, owner in zip(missing[n], owners[n], strict=True) if owner == index] for n in missing}
    made = ((number, index, some) for number, some in make({n: part for n, part in own.items() if part}))
    parts: dict[int, dict[int, list[R]]] = {n: {} for n in missing}
    for number, process, some in multihost.to_primary(
        made,
        lambda part: b"%d %d " % part[:2] + rows.to_bytes(part[2], shards.schema),
        lambda data: _received(data, shards.kind),
    ):
        parts[number][process] = some
        if len(parts[number]) == len(set(owners[number])):
            yield number, _in_order(parts.pop(number), owners[number])


def _in_order(parts: Mapping[int, list[R]], owners: Sequence[int]) -> list[R]:
    """The rows of a slice, of which each process has those of its items in their order."""
    each = sum(map(len, parts.values())) // len(owners)
    left = {process: iter(part) for process, part in parts.items()}
    return [row for owner in owners for row in itertools.islice(left[owner], each)]


def _received(data: bytes, kind: type[R]) -> tuple[int, int, list[R]]:
    number, process, table = data.split(b" ", 2)
    return int(number), int(process), rows.from_bytes(table, kind)


def publish(files: Sequence[Path], folder: Path) -> None:
    """Copies finished shards into the artifact; process 0 of a group has all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in files if multihost.is_primary() else ():
        # The shard stays in the work folder: a kill before the artifact is committed must find it there.
        shutil.copyfile(path, folder / path.name)

"""Final shards made by the workers of a cluster, where the pieces of blocks are too many for one machine.

    Groups of blocks -> Spread -> Cut by shard -> Together -> Finish: one Parquet file a shard, then its receipt
                                     |                          |
                                     rows of each shard -> their sums over all groups

What decides which rows stay is known by then (`tuning.data.merge.fates`): it follows from the ledger, which is small.
Workers read pieces from the scratch URL and write shards to it; a shard passes through the runner's shuffle once, in an
element for each group that has rows of it. A restarted run makes the shards that have no receipt.

The sums say whether all rows of a shard, and all groups, have come: what a runner loses is an error.
"""

# mypy: disable-error-code="no-untyped-call"
# Beam's transforms have no annotations.

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.metrics import Metrics

from tuning.atomic import whole_file
from tuning.data.digests import Digests
from tuning.data.gather import Blocks, kind_of, schema_of, tables
from tuning.data.merge import ordered, without
from tuning.data.pipeline import executed, pipeline_on
from tuning.data.receipts import counted, read_receipts, remove_receipt, write_receipt
from tuning.data.remote import SourceError, again, filesystem, publish
from tuning.data.runners import Runner
from tuning.data.schema import SCHEMAS, ipc_bytes, table_of, write_parquet
from tuning.data.versions import Versions, here

GROUP_BYTES = 1 << 27
"""Bytes in memory of the rows of a group, of which a worker holds one output at a time, twice. Larger groups give fewer
and larger elements."""
CELL_BYTES = 1 << 14
"""Bytes that an element should have at least: where there are many shards groups grow, to `MOST_BYTES`."""
MOST_BYTES = 1 << 29

Group = tuple[int, dict[str, str]]
"""Its number, and the checksums of its files by their names."""
Key = tuple[str, int]
"""An output and a shard."""
Cell = tuple[int, int, bytes]
"""The number of a group, and its rows of a shard: bytes of the record batch, and the batch, compressed. The schema is
that of the output."""
COUNTS = "counts"
"""Of each group by its number: its rows of each output and shard, in order, and behind them 1 for itself."""


MARK: Cell = (-1, 0, b"")
"""Of each shard that is wanted, since one without rows is a file too."""
AGAIN = "the runner has lost elements; run again, or use another one"


class LostRows(RuntimeError):
    """A shard for which a runner has not brought all rows together, or that it has not made."""


@dataclasses.dataclass(frozen=True)
class Merge:
    """What the workers have to know."""

    pieces: str
    """URL of the blocks' files."""
    into: str
    """URL of the finished shards. It has a name of its own for what blocks hold and the contents that leave."""
    outputs: tuple[str, ...]
    shards: int
    seed: int | None
    """Shuffles the rows of a shard; None: they are sorted by id."""
    groups: int
    gone: str | None
    """URL of the contents to leave out."""
    versions: Versions = dataclasses.field(default_factory=here, repr=False)
    """What workers must have as well."""

    @property
    def cells(self) -> int:
        """Shards of all outputs."""
        return len(self.outputs) * self.shards

    def cell(self, output: str, shard: int) -> int:
        """The number of a shard among those of all outputs."""
        return self.outputs.index(output) * self.shards + shard


def name_of(output: str, shard: int) -> str:
    """Of a shard's file, less its suffix."""
    return f"{output}-{shard:05d}"


class Cut(beam.DoFn):
    """Group of blocks -> its rows of each shard that is wanted."""

    def __init__(self, merge: Merge, wanted: Mapping[str, Sequence[int]]) -> None:
        self.merge, self.wanted = merge, wanted

    def setup(self) -> None:
        self.gone = None
        if self.merge.gone is not None:
            folder, _, name = self.merge.gone.rpartition("/")
            self.gone = Digests(next(tables(folder, [name]))["content"].combine_chunks())

    def process(self, group: Group) -> Iterator[tuple[Key, Cell] | beam.pvalue.TaggedOutput]:
        number, files = group
        counts = np.zeros(self.merge.cells + 1, np.int64)
        counts[-1] = 1
        for output, shards in self.wanted.items():
            table = self._rows(output, {name: files[name] for name in files if kind_of(name) == output})
            present, starts, sizes = np.unique(table["shard"].to_numpy(), return_index=True, return_counts=True)
            kept = np.isin(present, shards)
            for shard, start, size in zip(present[kept], starts[kept], sizes[kept], strict=True):
                counts[self.merge.cell(output, shard)] = size
                Metrics.counter("Cut", "rows").inc(int(size))
                yield (output, int(shard)), (number, *_packed(table.slice(start, size)))
        yield beam.pvalue.TaggedOutput(COUNTS, (number, counts))

    def _rows(self, output: str, names: Mapping[str, str]) -> pa.Table:
        """The rows of these files that stay, sorted by shard."""
        table = pa.concat_tables(
            [table_of([], schema_of(output)), *(without(t, self.gone) for t in tables(self.merge.pieces, names))]
        )
        return table.take(pa.array(np.argsort(table["shard"].to_numpy(), kind="stable"))).combine_chunks()


def _packed(table: pa.Table) -> tuple[int, bytes]:
    """Rows as those of a Cell. Without the schema, which may have more bytes than they have."""
    (batch,) = table.combine_chunks().to_batches()
    data = batch.serialize()
    return data.size, pa.compress(data, "lz4", asbytes=True)


def _unpacked(cell: Cell, schema: pa.Schema) -> pa.RecordBatch:
    _, size, data = cell
    return pa.ipc.read_record_batch(pa.decompress(data, size, "lz4"), schema)


class Finish(beam.DoFn):
    """All rows of a shard, and the sums of all -> its file and its receipt."""

    def __init__(self, merge: Merge) -> None:
        self.merge = merge

    def process(self, element: tuple[Key, Iterable[Cell]], sums: np.ndarray) -> Iterator[str]:
        (output, shard), cells = element
        name = name_of(output, shard)
        if sums[-1] != self.merge.groups:
            raise LostRows(
                f"{name}: {sums[-1]} groups of blocks have been divided, expected {self.merge.groups}: {AGAIN}"
            )
        # By number: a runner may bring an element twice.
        found = {cell[0]: cell for cell in cells if cell[0] != MARK[0]}
        schema = pa.schema(list(schema_of(output).items()))
        table = pa.Table.from_batches([_unpacked(found.pop(number), schema) for number in sorted(found)], schema)
        if len(table) != (expected := sums[self.merge.cell(output, shard)]):
            raise LostRows(f"{name}: {len(table)} rows have arrived, expected {expected}: {AGAIN}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "shard.parquet")
            rows = write_parquet(path, [ordered(table, output, shard, self.merge.seed)], SCHEMAS[output])
            data = path.read_bytes()
        publish(f"{self.merge.into}/{name}.parquet", data)
        # Last: a shard with a receipt is finished.
        write_receipt(self.merge.into, name, {"rows": rows, "sha256": hashlib.sha256(data).hexdigest()})
        Metrics.counter("Finish", "rows").inc(rows)
        yield name


def _first(element: tuple[int, Iterable[np.ndarray]]) -> np.ndarray:
    """The counts of a group, which a runner may bring twice."""
    return next(iter(element[1]))


def _sum(found: Iterable[np.ndarray], cells: int) -> np.ndarray:
    return sum(found, start=np.zeros(cells + 1, np.int64))


def planned(
    pieces: str,
    into: str,
    blocks: Blocks,
    sizes: Mapping[str, int],
    outputs: Sequence[str],
    shards: int,
    seed: int | None = None,
    gone: pa.Array | None = None,
) -> tuple[Merge, list[Group]]:
    """The merge of blocks, and its groups of them. Writes the contents that leave where workers read them.

    Args:
        pieces: URL of the blocks' files. into: URL below which the shards are written.
        sizes: bytes of the rows of each block, in memory.
        outputs: those that are made. seed: shuffles the rows by it. gone: contents whose rows are left out.
    """
    content = None if gone is None or not len(gone) else ipc_bytes(pa.table({"content": gone}))
    known = [blocks, shards, seed, content and hashlib.sha256(content).hexdigest()]
    into = f"{into}/{hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]}"
    if content is not None:
        publish(f"{into}/gone.arrow", content)
    most = min(max(GROUP_BYTES, shards * CELL_BYTES), MOST_BYTES)
    groups: list[Group] = []
    room = 0
    for name, own in blocks.items():
        if not groups or sizes[name] > room:
            groups.append((len(groups), {}))
            room = most
        groups[-1][1].update((file, own[file]) for file in own if kind_of(file) in outputs)
        room -= sizes[name]
    gone_url = None if content is None else f"{into}/gone.arrow"
    return Merge(pieces, into, tuple(outputs), shards, seed, len(groups), gone_url), groups


def finished(merge: Merge) -> dict[Key, dict[str, Any]]:
    """The receipts of the shards that are there."""
    found = read_receipts(merge.into)
    every = ((output, shard) for output in merge.outputs for shard in range(merge.shards))
    return {key: found[name_of(*key)] for key in every if name_of(*key) in found}


def run(
    merge: Merge, groups: Sequence[Group], runner: Runner, progress: Callable[[int], None] = lambda shards: None
) -> dict[Key, dict[str, Any]]:
    """Has the runner make the shards that are not there; returns the receipts of all.

    progress: called from time to time with the number of those that are there.

    Raises:
        LostRows: shards are missing although the runner has ended without an error.
        RunnerError: no job server answers where the runner's options name one.
    """
    done = finished(merge)
    missing = [(output, s) for output in merge.outputs for s in range(merge.shards) if (output, s) not in done]
    if not missing:
        return done
    wanted = {output: [s for o, s in missing if o == output] for output, _ in missing}
    pipeline = pipeline_on(runner)
    cells = (
        pipeline
        | "Groups" >> beam.Create(list(groups))
        | "Spread" >> beam.Reshuffle()
        | "Cut" >> beam.ParDo(Cut(merge, wanted)).with_output_types(tuple[Key, Cell]).with_outputs(COUNTS, main="cells")
    )
    sums = (
        cells[COUNTS]
        | "By group" >> beam.GroupByKey()
        | "Once" >> beam.Map(_first)
        | "Sum" >> beam.CombineGlobally(functools.partial(_sum, cells=merge.cells))
    )
    marks = pipeline | "Wanted" >> beam.Create([(key, MARK) for key in missing])
    _ = (
        (cells["cells"], marks)
        | "All" >> beam.Flatten()
        | "Together" >> beam.GroupByKey()
        | "Finish" >> beam.ParDo(Finish(merge), beam.pvalue.AsSingleton(sums)).with_output_types(str)
    )
    with counted(merge.into, progress):
        executed(pipeline, runner)
    done = finished(merge)
    # The success of a runner does not prove that it has made every shard.
    missing = [key for key in missing if key not in done]
    if missing:
        raise LostRows(
            f"{len(missing)} shards have no receipt in {merge.into}, such as {name_of(*missing[0])}, although the "
            "runner has ended without an error: run again, or use another one"
        )
    return done


def fetch(merge: Merge, key: Key, receipt: Mapping[str, Any], path: Path) -> int:
    """Copies a finished shard to a local path; returns its rows. Raises SourceError where it is not what was made."""
    url = f"{merge.into}/{name_of(*key)}.parquet"
    fs, remote = filesystem(url)

    with whole_file(path) as partial:
        why = "it differs from its checksum"
        # Twice, since the way may have changed it. Other errors, as of a full disk here, say nothing of the shard.
        for _ in range(2):
            try:
                again(lambda: fs.get_file(remote, str(partial)), url)
            except FileNotFoundError:
                why = "it is gone"
                break
            with partial.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == receipt["sha256"]:
                    return int(receipt["rows"])
        remove_receipt(merge.into, name_of(*key))
        raise SourceError(f"{url} cannot be fetched ({why}); it is made again by the next run")

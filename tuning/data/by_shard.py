"""Final shards made by the workers of a cluster, where the pieces of blocks are too many for one machine.

    Groups of blocks -> Spread -> Cut by shard -> GroupByKey -> Finish: one Parquet file a shard, then its receipt

What decides which rows stay is known by then (`tuning.data.merge.fates`): it follows from the ledger, which is small.
Workers read pieces from the scratch URL and write shards to it; a shard passes through the runner's shuffle once, in as
many elements as there are groups. A restarted run makes the shards that have no receipt.

Each group has an element for each shard, also without rows: a shard whose elements are not all there is an error.
"""

# mypy: disable-error-code="no-untyped-call"
# Beam's transforms have no annotations.

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.metrics import Metrics

from tuning.atomic import whole_file
from tuning.data.gather import schema_of, tables
from tuning.data.merge import ordered, without
from tuning.data.pipeline import executed, pipeline_on
from tuning.data.receipts import read_receipts, remove_receipt, write_receipt
from tuning.data.remote import SourceError, again, filesystem, publish
from tuning.data.runners import Runner
from tuning.data.schema import SCHEMAS, ipc_bytes, ipc_table, table_of, write_parquet

GROUP_BYTES = 1 << 26
"""Raw bytes of the blocks of a group, of whose rows a worker holds one output at a time. Larger groups give fewer and
larger elements."""

Group = tuple[int, list[tuple[str, list[str]]]]
"""Its number, and its blocks with the outputs of each."""
Key = tuple[str, int]
"""An output and a shard."""
Cell = tuple[int, bytes]
"""The number of a group, and its rows of a shard as an Arrow file; empty where it has none."""


class LostRows(RuntimeError):
    """A shard for which a runner has not brought all rows together, or that it has not made."""


@dataclasses.dataclass(frozen=True)
class Merge:
    """What the workers have to know."""

    pieces: str
    """URL of the blocks' files."""
    into: str
    """URL of the finished shards. It has a name of its own for each set of blocks and of contents that leave."""
    outputs: tuple[str, ...]
    shards: int
    seed: int | None
    """Shuffles the rows of a shard; None: they are sorted by id."""
    groups: int
    gone: str | None
    """URL of the contents to leave out."""


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
            self.gone = next(tables(folder, [name]))["content"].combine_chunks()

    def process(self, group: Group) -> Iterator[tuple[Key, Cell]]:
        number, blocks = group
        for output, shards in self.wanted.items():
            names = [f"{block}.{output}.arrow" for block, outputs in blocks if output in outputs]
            cut = [self._cut(table) for table in tables(self.merge.pieces, names)]
            for shard in shards:
                slices = [table.slice(edges[shard], edges[shard + 1] - edges[shard]) for table, edges in cut]
                rows = pa.concat_tables(slices).combine_chunks() if any(map(len, slices)) else None
                Metrics.counter("Cut", "rows").inc(0 if rows is None else len(rows))
                yield (output, shard), (number, b"" if rows is None else ipc_bytes(rows))

    def _cut(self, table: pa.Table) -> tuple[pa.Table, list[int]]:
        """The rows that stay, by shard, and where those of each shard begin; the end of the last."""
        table = without(table, self.gone)
        shard = table["shard"].to_numpy()
        order = np.argsort(shard, kind="stable")
        edges = np.searchsorted(shard[order], np.arange(self.merge.shards + 1))
        return table.take(pa.array(order)), edges.tolist()


class Finish(beam.DoFn):
    """All rows of a shard -> its file and its receipt."""

    def __init__(self, merge: Merge) -> None:
        self.merge = merge

    def process(self, element: tuple[Key, Iterable[Cell]]) -> Iterator[str]:
        (output, shard), cells = element
        # By number: a runner may bring an element twice.
        found = dict(cells)
        if len(found) != self.merge.groups:
            raise LostRows(
                f"{name_of(output, shard)}: rows of {len(found)} groups of blocks have arrived, expected those of "
                f"{self.merge.groups}: the runner has lost elements; run again, or use another one"
            )
        empty = table_of([], schema_of(output))
        table = pa.concat_tables([empty, *(ipc_table(found.pop(n)) for n in sorted(found) if found[n])])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "shard.parquet")
            rows = write_parquet(path, [ordered(table, output, shard, self.merge.seed)], SCHEMAS[output])
            data = path.read_bytes()
        name = name_of(output, shard)
        publish(f"{self.merge.into}/{name}.parquet", data)
        # Last: a shard with a receipt is finished.
        write_receipt(self.merge.into, name, {"rows": rows, "sha256": hashlib.sha256(data).hexdigest()})
        Metrics.counter("Finish", "rows").inc(rows)
        yield name


def planned(
    pieces: str,
    into: str,
    blocks: Mapping[str, Sequence[str]],
    outputs: Sequence[str],
    shards: int,
    seed: int | None = None,
    gone: pa.Array | None = None,
    block_bytes: int = 1 << 23,
) -> tuple[Merge, list[Group]]:
    """The merge of blocks, and its groups of them. Writes the contents that leave where workers read them.

    Args:
        pieces: URL of the blocks' files. into: URL below which the shards are written. blocks: the outputs of each.
        outputs: those that are made. seed: shuffles the rows by it. gone: contents whose rows are left out.
        block_bytes: raw bytes of a block.
    """
    content = None if gone is None or not len(gone) else ipc_bytes(pa.table({"content": gone}))
    known = [list(map(list, sorted(blocks.items()))), shards, seed, content and hashlib.sha256(content).hexdigest()]
    into = f"{into}/{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]}"
    if content is not None:
        publish(f"{into}/gone.arrow", content)
    every = [(name, list(own)) for name, own in blocks.items()]
    size = max(1, GROUP_BYTES // max(1, block_bytes))
    groups = [(number, every[at : at + size]) for number, at in enumerate(range(0, len(every), size))]
    gone_url = None if content is None else f"{into}/gone.arrow"
    return Merge(pieces, into, tuple(outputs), shards, seed, len(groups), gone_url), groups


def finished(merge: Merge) -> dict[Key, dict[str, Any]]:
    """The receipts of the shards that are there."""
    found = read_receipts(merge.into)
    every = ((output, shard) for output in merge.outputs for shard in range(merge.shards))
    return {key: found[name_of(*key)] for key in every if name_of(*key) in found}


def run(merge: Merge, groups: Sequence[Group], runner: Runner) -> dict[Key, dict[str, Any]]:
    """Has the runner make the shards that are not there; returns the receipts of all.

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
        | "Cut" >> beam.ParDo(Cut(merge, wanted)).with_output_types(tuple[Key, Cell])
    )
    _ = cells | "Together" >> beam.GroupByKey() | "Finish" >> beam.ParDo(Finish(merge)).with_output_types(str)
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

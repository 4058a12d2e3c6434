"""The merge on a cluster: a Beam pipeline that writes the final shards from the pieces of blocks.

    Pieces -> Spread -> Divide: rows by output and shard -> Group -> Finish: one Parquet file for each shard

One machine merges the ledger first (`rlhf.tuning.data.merge.fates`), and that says which contents leave. Shards are
sorted by the function that sorts them without a cluster, so their bytes are the same. A worker holds one piece or one
shard. Beam may run an element twice: equal rows become one, and a file is replaced by an equal one.
"""

# mypy: disable-error-code="no-untyped-call"
# Beam's transforms have no annotations.

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.tuning.data.digests import Digests
from rlhf.tuning.data.gather import Blocks, files_of, kind_of, schema_of, tables
from rlhf.tuning.data.merge import ordered, without
from rlhf.tuning.data.pipeline import executed, pipeline_on
from rlhf.tuning.data.receipts import counted
from rlhf.tuning.data.remote import open_input, publish
from rlhf.tuning.data.runners import Runner
from rlhf.tuning.data.schema import SCHEMAS, ipc_bytes, ipc_table, write_parquet
from rlhf.tuning.data.versions import Versions, here

Shard = tuple[str, int]
"""An output, and the number of a shard."""
GONE = "gone.arrow"
"""The file of the contents that leave."""


@dataclasses.dataclass(frozen=True)
class Merge:
    """Settings that every worker needs."""

    pieces: str
    """URL of the blocks' files."""
    into: str
    """URL of the final shards."""
    seed: int | None = None
    """Shuffles the rows of a shard; None: they are sorted by id."""
    versions: Versions = dataclasses.field(default_factory=here, repr=False)
    """Versions that the workers must have as well."""

    def url(self, shard: Shard) -> str:
        """The file of a final shard."""
        return f"{self.into}/{shard[0]}-{shard[1]:05d}.parquet"


class Divide(beam.DoFn):
    """Name and checksum of a piece -> its rows of each shard, as Arrow files."""

    def __init__(self, merge: Merge, filtered: bool) -> None:
        self.merge, self.filtered = merge, filtered

    def setup(self) -> None:
        self.gone = None
        if self.filtered:
            self.gone = Digests(next(tables(self.merge.into, [GONE]))["content"].combine_chunks())

    def process(self, piece: tuple[str, str]) -> Iterator[tuple[Shard, bytes]]:
        table = without(next(tables(self.merge.pieces, dict([piece]))), self.gone)
        table = table.take(pa.array(np.argsort(table["shard"].to_numpy(), kind="stable")))
        found = np.unique(table["shard"].to_numpy(), return_index=True, return_counts=True)
        for shard, start, count in zip(*(values.tolist() for values in found), strict=True):
            yield (kind_of(piece[0]), shard), ipc_bytes(table.slice(start, count))


class Finish(beam.DoFn):
    """All rows of a shard -> its file."""

    def __init__(self, merge: Merge) -> None:
        self.merge = merge

    def process(self, element: tuple[Shard, Iterable[bytes]]) -> None:
        (output, shard), pieces = element
        empty = pa.schema(list(schema_of(output).items())).empty_table()
        rows = pa.concat_tables([empty, *(ipc_table(piece) for piece in pieces if piece)])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "shard.parquet")
            write_parquet(path, [ordered(rows, output, shard, self.merge.seed)], SCHEMAS[output])
            publish(self.merge.url((output, shard)), path.read_bytes())


def run(
    merge: Merge,
    blocks: Blocks,
    shards: Sequence[Shard],
    runner: Runner,
    gone: Digests | None = None,
    progress: Callable[[int], None] = lambda shards: None,
) -> None:
    """Writes the final shards.

    Args:
        shards: the shards to write. gone: contents that leave.
        progress: called from time to time with the number of written shards.
    Raises:
        RunnerError: no job server answers at the address in the runner's options.
    """
    if gone:
        publish(f"{merge.into}/{GONE}", ipc_bytes(pa.table({"content": gone.column})))
    pieces = [item for output in dict.fromkeys(o for o, _ in shards) for item in files_of(blocks, output).items()]
    pipeline = pipeline_on(runner)
    rows = (
        pipeline
        | "Pieces" >> beam.Create(pieces).with_output_types(tuple[str, str])
        | "Spread" >> beam.Reshuffle()
        | "Divide" >> beam.ParDo(Divide(merge, bool(gone))).with_output_types(tuple[Shard, bytes])
    )
    # A shard without rows is a file too.
    every = pipeline | "Shards" >> beam.Create([(s, b"") for s in shards]).with_output_types(tuple[Shard, bytes])
    _ = (rows, every) | beam.Flatten() | "Group" >> beam.GroupByKey() | "Finish" >> beam.ParDo(Finish(merge))
    with counted(merge.into, progress, ".parquet"):
        executed(pipeline, runner)


def fetch(merge: Merge, shard: Shard, path: Path) -> int:
    """Copies a final shard to a local path; returns its number of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_input(merge.url(shard)) as source, path.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    return int(pq.read_metadata(path).num_rows)

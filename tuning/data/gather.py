"""The pieces of all blocks, gathered by shard, a piece at a time.

pieces of blocks    | rows of shards 2 0 7 ... | rows of shards 5 1 0 ... |
folders of shards   shard 0   shard 1   shard 2   ...

Not `pyarrow.dataset.write_dataset`: it holds rows by their number, however long they are, which can be all of the data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
from pyarrow import dataset

from rlhf.tuning.data.receipts import SUFFIX
from rlhf.tuning.data.remote import SourceError, again, filesystem
from rlhf.tuning.data.schema import DEAD, LEDGER, ORDER, SCHEMAS, ipc_table

MAX_SHARDS = 512
"""Limit of shards, whose files are open at the same time; most systems allow 1,024 open files."""
AHEAD = 8
"""Pieces that are read at a time."""
TOGETHER = 2**25
"""Bytes of pieces, at least, whose rows of a shard are written as one batch: few batches, however many pieces."""

Blocks = Mapping[str, Mapping[str, str]]
"""By block, in the order of records, the checksums of its files by name."""


def outputs_of(blocks: Blocks) -> set[str]:
    """Return the outputs that any block has."""
    return {name.split(".")[1] for sums in blocks.values() for name in sums} & SCHEMAS.keys()


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of finished blocks, by shard in a local folder."""

    folder: Path
    shards: int
    source: str
    """Folder or URL of the blocks' files."""
    blocks: Blocks

    def read(self, output: str, shard: int, columns: list[str] | None = None) -> pa.Table:
        """Return the rows of a shard of an output or of the ledger, in no particular order."""
        files = [str(path) for path in (self.folder / output / str(shard)).glob("*.arrow")]
        return dataset.dataset(files, _schema(output), "ipc").to_table(columns)

    def dead(self) -> Iterator[pa.Table]:
        """Yield the dead letters of each block."""
        for table in tables(self.source, self.blocks, "dead"):
            yield table.select(list(DEAD))


def _schema(output: str) -> pa.Schema:
    """Return the columns of pieces, without the shard, which is the name of the folder."""
    columns = LEDGER if output == "ledger" else {**SCHEMAS[output], **ORDER}
    return pa.schema([item for item in columns.items() if item[0] != "shard"])


def gather(folder: str, blocks: Blocks, shards: int, into: Path) -> Pieces:
    """Divide the blocks' files in `folder`, a path or URL, by shard into the folder `into`, which is replaced.

    Raises SourceError if a file of a block is missing or damaged.
    """
    shutil.rmtree(into, ignore_errors=True)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    for output in sorted({"ledger"} | outputs_of(blocks)):
        schema, files = _schema(output), dict[int, pa.RecordBatchFileWriter]()
        with contextlib.ExitStack() as opened:
            for table in _joined(tables(folder, blocks, output)):
                start, rows = 0, table.sort_by("shard")
                for shard, count in sorted(Counter(table["shard"].to_pylist()).items()):
                    if shard not in files:
                        path = into / output / str(shard) / "0.arrow"
                        path.parent.mkdir(parents=True)
                        files[shard] = opened.enter_context(pa.ipc.new_file(str(path), schema, options=options))
                    files[shard].write_table(rows.slice(start, count).select(schema.names))
                    start += count
    return Pieces(into, shards, folder, blocks)


def _joined(pieces: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield tables of `TOGETHER` bytes or more, and the rest."""
    held, size = list[pa.Table](), 0
    for piece in pieces:
        held.append(piece)
        size += piece.nbytes
        if size >= TOGETHER:
            yield pa.concat_tables(held)
            held, size = [], 0
    if held:
        yield pa.concat_tables(held)


def tables(folder: str, blocks: Blocks, kind: str) -> Iterator[pa.Table]:
    """Yield the tables of an output, the ledger or the dead letters, in the order of the blocks.

    Raises SourceError if a file is missing or differs from its checksum. The block loses its receipt, so that the next
    run recomputes it.
    """
    fs, path = filesystem(folder)
    files = [(block, *item) for block, sums in blocks.items() for item in sums.items() if item[0].split(".")[1] == kind]

    def table(file: tuple[str, str, str]) -> pa.Table:
        block, name, checksum = file
        try:
            data = again(lambda: fs.cat_file(f"{path}/{name}"), f"{folder}/{name}")
            if hashlib.sha256(data).hexdigest() == checksum:
                return ipc_table(data)
            fault = "is damaged (it differs from its checksum)"
        except FileNotFoundError:
            fault = "is missing"
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(f"{path}/{block}{SUFFIX}")
        raise SourceError(f"{folder}/{name} {fault}: run again to recompute it")

    with ThreadPoolExecutor(AHEAD) as pool:
        for start in range(0, len(files), AHEAD):
            yield from pool.map(table, files[start : start + AHEAD])

"""The pieces of all blocks brought together by shard.

    files of blocks     | rows of shards 2 0 7 ... | rows of shards 5 1 0 ... |      each is read once
    files of shards     shard 0   shard 1   shard 2   ...                           each is written once

Where there are more shards than files may be open, rows go to files of ranges of shards first, which are divided in the
same way. So the files that are opened are as many as there are blocks, ranges and shards, never blocks times shards,
and rows are written in batches of some size, however few a block has of a shard. Where a cluster writes the
shards (`rlhf.tuning.data.merge_pipeline`) only the ledger comes here.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf.tuning.data.receipts import remove_receipt
from rlhf.tuning.data.remote import SourceError, again, filesystem
from rlhf.tuning.data.schema import LEDGER, ORDER, SCHEMAS, ipc_table

FAN = 64
"""Files that rows are divided over at a time."""
PENDING_BYTES = 1 << 26
"""Of rows that are held until they are written."""
AHEAD = 8
"""Files of an object store that are fetched at a time."""


Blocks = Mapping[str, Mapping[str, str]]
"""Of each block, in the order of records, the checksums of its files by their names."""


def kind_of(name: str) -> str:
    """The output of a block's file; `ledger` or `dead` where it is none."""
    return name.split(".")[1]


def files_of(blocks: Blocks, kind: str) -> dict[str, str]:
    """The files of this kind of all blocks."""
    return {name: found for own in blocks.values() for name, found in own.items() if kind_of(name) == kind}


def outputs_of(blocks: Blocks) -> set[str]:
    """The outputs that any block has."""
    return {kind_of(name) for own in blocks.values() for name in own} & SCHEMAS.keys()


def gather(folder: str, blocks: Blocks, shards: int, into: Path, threads: int = 1, rows: bool = True) -> None:
    """Writes `into`, which is made anew, the files of shards, by `file_of`.

    Args:
        folder: path or URL of the blocks' files. threads: outputs that are gathered at a time.
        rows: else the ledger alone.
    Raises:
        OSError, SourceError: a file of a block is missing or cannot be read.
    """
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    outputs = sorted(outputs_of(blocks)) if rows else []

    def one(output: str) -> None:
        _divide(tables(folder, files_of(blocks, output)), into / output, 0, shards)

    with ThreadPoolExecutor(max(1, threads)) as pool:
        # The ledger first: it has a line for every record.
        collections.deque(pool.map(one, ["ledger", *outputs]), maxlen=0)


def file_of(into: Path, output: str, shard: int) -> Path:
    """The file of a shard of an output; where it has no rows there is none."""
    return into / output / f"{shard}-{shard + 1}.arrow"


def schema_of(output: str) -> dict[str, pa.DataType]:
    """The columns of the files of an output, or of the ledger."""
    return dict(LEDGER) if output == "ledger" else {**SCHEMAS[output], **ORDER}


def tables(folder: str, names: Mapping[str, str] | Sequence[str]) -> Iterator[pa.Table]:
    """The tables of files in a folder or below a URL, in order.

    names: with checksums that the files are compared with before they are decoded.

    Raises SourceError where one is gone or damaged. Its block has no receipt then, and is made again by the next run: a
    rule of an object store may delete what is old, and nobody else compares what is in one.
    """
    sums = names if isinstance(names, Mapping) else {}
    local = "://" not in folder
    fs, path = filesystem(folder)

    def read(name: str) -> pa.Buffer:
        if local:
            with pa.memory_map(str(Path(folder, name))) as file:
                return file.read_buffer()
        return pa.py_buffer(again(functools.partial(fs.cat_file, f"{path}/{name}"), f"{folder}/{name}"))

    def table(name: str) -> pa.Table:
        return _table(folder, name, read, sums.get(name))

    if local:
        yield from map(table, names)
        return
    with ThreadPoolExecutor(AHEAD) as pool:
        waiting: collections.deque[Future[pa.Table]] = collections.deque()
        for name in names:
            waiting.append(pool.submit(table, name))
            if len(waiting) == AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _table(folder: str, name: str, read: Callable[[str], pa.Buffer], wanted: str | None) -> pa.Table:
    """The table of a block's file, which has this checksum where one is given; else no receipt is left of the block."""
    try:
        data = read(name)
    except FileNotFoundError:
        why = "is gone"
    else:
        try:
            if wanted in (None, hashlib.sha256(data).hexdigest()):
                return ipc_table(data)
            why = "is damaged (it differs from its checksum)"
        # Of what is in memory: that of a damaged frame is no error of a disk.
        except (pa.ArrowInvalid, OSError) as error:
            why = f"is damaged ({error})"
    with contextlib.suppress(FileNotFoundError):
        remove_receipt(folder, name.split(".")[0])
    raise SourceError(f"{folder}/{name} {why}; what it was made of is read again by the next run")


def _divide(found: Iterable[pa.Table], into: Path, low: int, high: int) -> None:
    """Writes the rows of shards `low` to `high` into a file for each."""
    width = -(-(high - low) // FAN)
    bounds = [*range(low, high, width), high]
    paths = [into / f"{start}-{stop}.arrow" for start, stop in itertools.pairwise(bounds)]
    with _Files(paths) as files:
        for table in found:
            number = (table["shard"].to_numpy() - low) // width
            order = np.argsort(number, kind="stable")
            files.put(table.take(pa.array(order)), np.searchsorted(number[order], np.arange(len(paths) + 1)))
    for path, (start, stop) in zip(paths, itertools.pairwise(bounds), strict=True):
        # That of one shard is done.
        if stop - start > 1 and path.is_file():
            _divide(_batches(path), into, start, stop)
            path.unlink()


def _batches(path: Path) -> Iterator[pa.Table]:
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield pa.Table.from_batches([reader.get_batch(number)])


class _Files:
    """Files that get rows in batches; one without rows is never made."""

    def __init__(self, paths: Sequence[Path]):
        self._paths, self._stack = paths, contextlib.ExitStack()
        self._writers: dict[int, Any] = {}
        self._held: list[list[pa.Table]] = [[] for _ in paths]
        self._bytes = 0

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        with self._stack:
            if kind is None:
                self._flush()

    def put(self, table: pa.Table, edges: np.ndarray) -> None:
        """Rows for each file: those of file i are `edges[i]` to `edges[i + 1]`."""
        for held, start, stop in zip(self._held, edges[:-1], edges[1:], strict=True):
            if stop > start:
                held.append(table.slice(start, stop - start))
        # A slice keeps all of its table in memory.
        self._bytes += table.nbytes
        if self._bytes >= PENDING_BYTES:
            self._flush()

    def _flush(self) -> None:
        for number, held in enumerate(self._held):
            if held:
                table = pa.concat_tables(held).combine_chunks()
                self._writer(number, table.schema).write_table(table)
                held.clear()
        self._bytes = 0

    def _writer(self, number: int, schema: pa.Schema) -> Any:
        if number not in self._writers:
            path = self._paths[number]
            path.parent.mkdir(parents=True, exist_ok=True)
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            writer = pa.ipc.new_file(str(path), schema, options=options)
            self._writers[number] = self._stack.enter_context(writer)
        return self._writers[number]

"""Rows of prepared data, and their files: equal tables give equal bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.tuning.rows import Hashes, Ids, Number, PromptRow, Row, Text, columns_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftRow(Row):
    """A completion to imitate: a row of `sft`."""

    id: Text
    prompt_ids: Ids
    completion_ids: Ids
    completion_mask: Annotated[list[int], pa.list_(pa.int8())] | None = None
    """1 for the tokens that SFT trains; None: SFT trains all."""
    prompt: Text
    completion: Text
    source: Text
    """File or task of the record."""
    record: Number
    """Its number there, from 1."""
    content: Text
    """sha256 of all of the record but its id."""
    group: Text
    """Group of the record, which no split divides; the prompt's, where the record names none."""
    turns: Hashes | None = None
    """Hashes of the turns before each that is trained, the system's left out (`rlhf.tuning.data.pipeline`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairRow(Row):
    """A chosen and a rejected completion: a row of `preference`; provenance as in SftRow."""

    id: Text
    prompt_ids: Ids
    chosen_ids: Ids
    rejected_ids: Ids
    prompt: Text
    chosen: Text
    rejected: Text
    margin: Annotated[float, pa.float64()] | None = None
    """How much better the chosen one is."""
    source: Text
    record: Number
    content: Text
    group: Text
    turns: Hashes | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledRow(Row):
    """A completion and whether it is good: a row of `labelled`; provenance as in SftRow."""

    id: Text
    prompt_ids: Ids
    completion_ids: Ids
    label: Annotated[bool, pa.bool_()]
    prompt: Text
    completion: Text
    source: Text
    record: Number
    content: Text
    group: Text
    turns: Hashes | None = None


ROWS: dict[str, type[Row]] = {
    "sft": SftRow,
    "preference": PairRow,
    "labelled": LabelledRow,
    "prompts": PromptRow,
    "heldout": PromptRow,
    "heldout_sft": SftRow,
    "heldout_preference": PairRow,
    "heldout_labelled": LabelledRow,
}
"""Rows of each output; `heldout_sft` holds the `sft` rows of held-out groups, and so on."""
SCHEMAS = {output: columns_of(kind) for output, kind in ROWS.items()}
"""Columns of each output."""

DEAD: dict[str, pa.DataType] = {
    "source": pa.string(),
    "record": pa.int64(),
    "step": pa.string(),
    "reason": pa.string(),
    "raw": pa.string(),
}
"""Columns of the dead letters."""

ORDER = {"key": pa.string(), "position": pa.int64(), "shard": pa.int32()}
"""Columns of pieces that outputs lack: the key of equal rows, the record's number in all sources, and the shard, which
follows from the key."""

LEDGER: dict[str, pa.DataType] = {
    "id": pa.string(),
    "group": pa.string(),
    "fate": pa.string(),
    "heldout": pa.bool_(),
    "rows": pa.list_(pa.string()),
    "dropped": pa.list_(pa.string()),
    **dict.fromkeys(("id_hash", "group_hash"), pa.uint64()),
    "prompt_hashes": pa.list_(pa.uint64()),
    "signature": pa.binary(),
    **ORDER,
}
"""Columns of the ledger, which has a line for each readable record with its fate."""

# Groups are small because a reader decodes a whole group to read one of its rows.
ROW_GROUP = 1 << 13


def table_of(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, pa.DataType]) -> pa.Table:
    """Return a table of the columns; fields that a row lacks are null."""
    return pa.table(
        {name: pa.array([row.get(name) for row in rows], type=kind) for name, kind in columns.items()},
        schema=pa.schema(list(columns.items())),
    )


def write_parquet(path: Path, tables: Iterable[pa.Table], columns: Mapping[str, pa.DataType]) -> int:
    """Write tables one after another as one file. Its bytes do not depend on how the rows are divided into tables.

    They do depend on the version of pyarrow, which is part of the file. Returns the number of rows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with pq.ParquetWriter(path, pa.schema(list(columns.items())), compression="zstd") as writer:
        for group in _regroup(tables, ROW_GROUP):
            writer.write_table(group, row_group_size=ROW_GROUP)
            count += group.num_rows
    return count


def _regroup(tables: Iterable[pa.Table], size: int) -> Iterator[pa.Table]:
    """Yield the same rows in tables of `size` rows; the last table may be smaller."""
    pending: list[pa.Table] = []
    held = 0
    for table in tables:
        pending.append(table)
        held += table.num_rows
        while held >= size:
            joined = pa.concat_tables(pending)
            yield joined.slice(0, size).combine_chunks()
            pending, held = [joined.slice(size)], held - size
    if held:
        yield pa.concat_tables(pending).combine_chunks()


def ipc_bytes(table: pa.Table) -> bytes:
    """Return an Arrow file of the table."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def ipc_table(file: Path | bytes | pa.Buffer) -> pa.Table:
    """Return the table of an Arrow file, local or in memory."""
    with pa.memory_map(str(file)) if isinstance(file, Path) else pa.BufferReader(file) as source:
        return pa.ipc.open_file(source).read_all()

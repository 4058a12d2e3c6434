"""Rows of Parquet and Arrow files as lines of JSON."""

from __future__ import annotations

import datetime
import decimal
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa


def batch_lines(batch: pa.RecordBatch) -> Iterator[bytes]:
    """JSON of each row.

    Bytes are text in UTF-8 and maps are objects. Dates, times, decimals and UUIDs, which JSON does not have, become
    text. Null fields of structs in lists are left out: such structs have the fields of all rows, as the arguments of
    calls of different tools. Raises ValueError for a value of another type.
    """
    for row in batch.to_pylist(maps_as_pydicts="strict"):
        yield json.dumps(_without_nulls(row), default=_as_text).encode()


def _without_nulls(value: Any, within: bool = False) -> Any:
    """The value with null fields outside of lists alone: metadata that is null stays so for a reward."""
    if isinstance(value, dict):
        return {name: _without_nulls(one, within) for name, one in value.items() if one is not None or not within}
    return [_without_nulls(one, True) for one in value] if isinstance(value, list) else value


def _as_text(value: Any) -> str:
    match value:
        case bytes():
            # A byte that is not UTF-8 becomes a lone surrogate: then one record is dead, not the file.
            return value.decode("utf-8", "surrogateescape")
        case decimal.Decimal():
            return format(value, "f")
        case datetime.date() | datetime.time() | datetime.timedelta() | uuid.UUID():
            return str(value)
    raise ValueError(f"expected values that have a form in JSON, got {type(value).__name__} {value!r:.60}")

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
    text. Fields of structs that are null are left out: the structs of a column have the fields of all its rows, as the
    arguments of calls of different tools. Raises ValueError for a value of another type.
    """
    for row in batch.to_pylist(maps_as_pydicts="strict"):
        yield json.dumps({name: _without_nulls(value) for name, value in row.items()}, default=_as_text).encode()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


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

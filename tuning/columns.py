"""List columns of tables as flat arrays: no Python object a number, neither read nor written.

    values    5 6 7 8 9 4     one buffer for all rows of a column
    offsets   0     3   5 6   row i is values[offsets[i]:offsets[i + 1]]

A row is a view of the buffer that Arrow has read; the buffer lives as long as one of its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa


class Numbers(Sequence[Any]):
    """The numbers of one row: a view of an array, [n], that reads like a list and equals one with the same numbers.

    Python objects exist only while values are iterated or indexed. `np.asarray` copies nothing.
    """

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray):
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, at: Any) -> Any:
        return Numbers(self.array[at]) if isinstance(at, slice) else self.array[at].item()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Numbers | list | tuple | np.ndarray):
            return NotImplemented
        return len(self) == len(other) and bool((self.array == np.asarray(other)).all())

    # Equal to lists, which have no hash either.
    __hash__ = None  # type: ignore[assignment]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return repr(self.array.tolist())


def holds_numbers(kind: pa.DataType) -> bool:
    """Whether the values of a column of this type are lists of numbers."""
    return pa.types.is_list(kind) and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type))


def list_rows(column: pa.ChunkedArray) -> list[Numbers | None]:
    """The rows of a column of lists of numbers, as views of its buffers; None for a null.

    A null in a list of reals is NaN. Raises ValueError for one in a list of integers.
    """
    rows: list[Numbers | None] = []
    for chunk in column.chunks:
        # Of the whole buffer, and offsets into it: a slice of a table is not a copy, and nulls may hide values.
        values = _flat(chunk.values)
        ends = chunk.offsets.to_numpy().tolist()
        views = (Numbers(values[start:end]) for start, end in itertools.pairwise(ends))
        there = chunk.is_valid().to_pylist()
        rows += [view if valid else None for view, valid in zip(views, there, strict=True)]
    return rows


def _flat(values: pa.Array) -> np.ndarray:
    if not values.null_count:
        return values.to_numpy()
    if pa.types.is_integer(values.type):
        raise ValueError(f"{values.null_count} values of a list of {values.type} are null: expected numbers")
    return values.to_numpy(zero_copy_only=False)


def list_column(rows: Sequence[Sequence[float] | None], kind: pa.ListType) -> pa.Array:
    """Rows of numbers, None for a null, as a column of lists of this type.

    Raises ValueError for a number that a column of integers cannot hold.
    """
    there = [row for row in rows if row is not None]
    if len(there) < len(rows):
        return pa.array([None if row is None else list(row) for row in rows], kind)
    nothing = pa.array([], kind.value_type).to_numpy()
    arrays = [_exactly(row, nothing.dtype) for row in there]
    offsets = np.cumsum([0, *map(len, arrays)])
    flat = np.concatenate([nothing, *arrays])
    # Arrow refuses offsets that do not fit their 32 bits.
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat), type=kind)


def _exactly(row: Sequence[float], dtype: np.dtype[Any]) -> np.ndarray:
    """The numbers as an array of this type; reals are rounded to it."""
    given = np.asarray(row)
    if given.dtype == dtype:
        return given
    with np.errstate(invalid="ignore"):
        found = given.astype(dtype)
    # NumPy takes the low bits of what is too large, and cuts fractions off.
    if np.issubdtype(dtype, np.integer) and not np.array_equal(found, given):
        wrong = next(x for x, y in zip(given.tolist(), found.tolist(), strict=True) if x != y)
        raise ValueError(f"{wrong!r} is no {dtype}: expected a list of numbers of that type")
    return found

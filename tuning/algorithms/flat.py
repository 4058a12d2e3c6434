"""Numbers for the tokens of a round, without padding: a dense array is made of the rows that someone asks for.

    completions    a a a | b | c c            three, of 3, 1 and 2 tokens
    values         0 1 2   3   4 5            what is kept, [tokens]
    offsets        0       3   4   6
    gathered       4 5 0 0                    of the slots [2, -1, 0] of a micro-batch, [C, T] with T = 4
                   0 0 0 0
                   0 1 2 0

Axes: N completions of the round, C slots of a micro-batch, T the width that all rows are padded to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np

ROWS_AT_ONCE, TOKENS_AT_ONCE = 1024, 2**22
"""Rows of a block, and its tokens with their padding, where all of a round are padded, but not at once."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A number for each token of a round, by completion."""

    row: Callable[[int], np.ndarray]
    """The numbers of completion i: one for each of its tokens."""
    count: int
    """N."""
    width: int
    """T: no row is longer."""
    dtype: np.dtype[Any]

    def gathered(self, ids_C: Iterable[int]) -> np.ndarray:
        """The rows of these completions as a new array [C, T]: 0 past their ends, and in slots of number -1."""
        ids = [int(i) for i in ids_C]
        found = np.zeros((len(ids), self.width), self.dtype)
        for slot, i in enumerate(ids):
            if i >= 0:
                numbers = self.row(i)
                found[slot, : len(numbers)] = numbers
        return found

    def dense(self) -> np.ndarray:
        """All rows as a new array [N, T], which may be several times the column."""
        return self.gathered(range(self.count))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """As `dense`, where NumPy is given a column for an array."""
        return self.dense().astype(dtype or self.dtype, copy=False)


def blocks(count: int, width: int = 1) -> Iterator[range]:
    """The rows of a round of this size, so many at a time as `ROWS_AT_ONCE` and `TOKENS_AT_ONCE` allow."""
    size = max(1, min(ROWS_AT_ONCE, TOKENS_AT_ONCE // max(width, 1)))
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


@dataclasses.dataclass(frozen=True)
class Flat(Column):
    """A column with stored numbers, one completion after another."""

    values: np.ndarray
    """[tokens]"""
    offsets: np.ndarray
    """Completion i has the values from offsets[i] to offsets[i + 1], [N + 1]."""

    @classmethod
    def zeros(cls, lengths_N: np.ndarray, width: int, dtype: Any) -> Flat:
        """For completions of these lengths."""
        offsets = np.concatenate([[0], np.cumsum(lengths_N, dtype=np.int64)])
        values = np.zeros(int(offsets[-1]), dtype)

        def row(i: int) -> np.ndarray:
            return values[offsets[i] : offsets[i + 1]]

        return cls(row, len(lengths_N), width, values.dtype, values, offsets)

    @classmethod
    def of(cls, x_NT: np.ndarray, lengths_N: np.ndarray) -> Flat:
        """What a dense array [N, T] has for the tokens of completions of these lengths."""
        found = cls.zeros(lengths_N, x_NT.shape[1], x_NT.dtype)
        found.put(range(len(x_NT)), x_NT)
        return found

    def put(self, ids_C: Iterable[int], x_CT: np.ndarray) -> None:
        """Writes rows of an array, whatever is past their ends left out; those of number -1 have no place."""
        for i, numbers in zip(ids_C, x_CT, strict=True):
            if i >= 0:
                row = self.row(int(i))
                row[:] = numbers[: len(row)]

    def clear(self, which_N: np.ndarray) -> None:
        """Writes 0 for all tokens of these completions, [N] bool."""
        for i in np.flatnonzero(which_N).tolist():
            self.row(i)[:] = 0


class Dense:
    """A field of a dataclass that takes a `Column`, or an array [N, T], and reads as an array.

    Each reader of a column gets a new array.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Dense: ...
    @overload
    def __get__(self, instance: object, owner: type) -> np.ndarray: ...
    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            # Read by `dataclasses` when it looks for a default: the field has none.
            raise AttributeError(self.name)
        held = vars(instance)[self.name]
        return held.dense() if isinstance(held, Column) else held

    def __set__(self, instance: object, value: Column | np.ndarray) -> None:
        vars(instance)[self.name] = value


def lengths_of(instance: object, name: str) -> np.ndarray:
    """How many numbers each row of a field has, [N]: of an array all that it is wide."""
    held = vars(instance)[name]
    if not isinstance(held, Column):
        return np.full(len(held), held.shape[1])
    return np.asarray([len(held.row(i)) for i in range(held.count)])


def rows_of(instance: object, name: str, ids: Sequence[int]) -> np.ndarray:
    """Some rows of a field that is a column or an array [N, T], as of its dense array."""
    held = vars(instance)[name]
    return held.gathered(ids) if isinstance(held, Column) else np.asarray(held)[list(ids)]


def sums_of_rows(instance: object, name: str) -> np.ndarray:
    """The sum of each row of a `Dense` field, [N], as of its dense array."""
    held = vars(instance)[name]
    if not isinstance(held, Column):
        return held.sum(-1)
    # The zeros behind a row are part of it: NumPy adds in an order that depends on the width.
    return np.concatenate([held.gathered(rows).sum(-1) for rows in blocks(held.count)])

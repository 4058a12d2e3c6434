"""Numbers for the tokens of a round, without padding: rows are padded only when a micro-batch or a block needs them.

    completions    a a a | b | c c            three, of 3, 1 and 2 tokens
    rows           0 1 2   3   4 5            the stored numbers
    gather         4 5 0 0                    of the slots [2, -1, 0] of a micro-batch, [C, T] with T = 4
                   0 0 0 0
                   0 1 2 0

Axes: N completions of the round, C slots of a micro-batch, T the width that all rows are padded to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

ROWS_AT_ONCE, TOKENS_AT_ONCE = 1024, 2**22
"""Limits of a block: its rows, and its tokens with their padding."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A number for each token of a round, by completion. As a mask it chooses the tokens with a number above 0."""

    row: Callable[[int], np.ndarray]
    """The numbers of completion i: one for each of its tokens."""
    count: int
    """N."""
    width: int
    """T: no row is longer."""
    dtype: np.dtype[Any]

    @classmethod
    def zeros(cls, lengths_N: np.ndarray, width: int, dtype: Any) -> Column:
        """A column that can be written, for completions of these lengths."""
        ends = np.cumsum(lengths_N)
        rows = np.split(np.zeros(int(ends[-1]), dtype), ends[:-1])
        return cls(rows.__getitem__, len(rows), width, np.dtype(dtype))

    @classmethod
    def of(cls, x_NT: np.ndarray, lengths_N: np.ndarray | None = None) -> Column:
        """Copy the tokens of completions of these lengths from a dense array; by default all numbers."""
        column = cls.zeros(np.full(*x_NT.shape) if lengths_N is None else lengths_N, x_NT.shape[1], x_NT.dtype)
        column.put(range(len(x_NT)), x_NT)
        return column

    @property
    def lengths_N(self) -> np.ndarray:
        """Numbers of each row, [N]."""
        return np.asarray([len(self.row(i)) for i in range(self.count)])

    @property
    def sums_N(self) -> np.ndarray:
        """The sum of each row, [N], to the bit as of the dense array."""
        # NumPy adds in an order that depends on the width, so rows are padded first.
        return np.concatenate([self.gather(rows).sum(-1) for rows in self.blocks()])

    def gather(self, ids_C: Iterable[int]) -> np.ndarray:
        """Pad the rows of these completions to a new array [C, T]; slots of number -1 are 0."""
        ids = [int(i) for i in ids_C]
        x_CT = np.zeros((len(ids), self.width), self.dtype)
        for slot, i in enumerate(ids):
            if i >= 0:
                numbers = self.row(i)
                x_CT[slot, : len(numbers)] = numbers
        return x_CT

    def dense(self) -> np.ndarray:
        """Pad all rows to a new array [N, T], which may be several times the column."""
        return self.gather(range(self.count))

    def __getitem__(self, rows: Sequence[int]) -> Column:
        return Column.of(self.gather(rows))

    def blocks(self) -> Iterator[range]:
        """Yield the numbers of the completions in blocks that may be padded at once."""
        size = max(1, min(ROWS_AT_ONCE, TOKENS_AT_ONCE // max(self.width, 1)))
        for start in range(0, self.count, size):
            yield range(start, min(start + size, self.count))

    def put(self, ids_C: Iterable[int], x_CT: np.ndarray) -> None:
        """Write padded rows to these completions; slots of number -1 are skipped."""
        for i, numbers in zip(ids_C, x_CT, strict=True):
            if i >= 0:
                row = self.row(int(i))
                row[:] = numbers[: len(row)]

    def clear(self, which_N: np.ndarray) -> None:
        """Write 0 for all tokens of these completions, [N] bool."""
        for i in np.flatnonzero(which_N).tolist():
            self.row(i)[:] = 0

    def only(self, which_N: np.ndarray) -> Column:
        """The column with empty rows for all but these completions, [N] bool."""
        return dataclasses.replace(self, row=lambda i: self.row(i) if which_N[i] else np.zeros(0, self.dtype))

    def where(self, mask: Column) -> list[np.ndarray]:
        """The numbers of the tokens that a mask chooses, by completion."""
        return [self.row(i)[: len(mask_T)][mask_T > 0] for i, mask_T in enumerate(map(mask.row, range(self.count)))]

    def write(self, mask: Column, numbers: np.ndarray) -> None:
        """Write new numbers in the order of `where` to the tokens that a mask chooses."""
        start = 0
        for i in range(self.count):
            chosen_T = mask.row(i) > 0
            end = start + int(chosen_T.sum())
            self.row(i)[: len(chosen_T)][chosen_T] = numbers[start:end]
            start = end


def whiten(x: Column, mask: Column, *, shift_mean: bool = True, eps: float = 1e-8) -> None:
    """Replace x by (x - mean) / sqrt(var + eps) over the tokens of the mask, 0 elsewhere, as `losses.returns.whiten`.

    Sums are in float64. shift_mean=False adds the mean back.
    """
    valid = np.concatenate(x.where(mask))
    # Relative to the least value: the mean of values far from 0 has a larger error than their differences.
    least = float(valid.min()) if len(valid) else 0.0
    above = valid - least
    mean = float(above.sum(dtype=np.float64)) / max(len(valid), 1)
    variance = float(((above - mean).astype(np.float64) ** 2).sum()) / max(len(valid) - 1, 1)
    x.clear(np.ones(x.count, bool))
    x.write(mask, (above - mean) * (1.0 / np.sqrt(variance + eps)) + (0.0 if shift_mean else mean + least))

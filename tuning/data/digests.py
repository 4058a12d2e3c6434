"""Digests to look others up in, tens of millions of them: they are sorted once, and a look-up costs what is asked for.

A hash table of Arrow would be built by each call, and a column of texts has room for 2 GiB.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

SIZE = 32
"""Bytes of a sha256."""


class Digests:
    """Digests in order, 32 bytes each."""

    def __init__(self, column: pa.Array):
        """column: that of others."""
        self.column = column
        """Of fixed size, in order: as files have them."""
        self._sorted = np.frombuffer(column.buffers()[1], f"S{SIZE}", len(column), column.offset * SIZE)

    @classmethod
    def of(cls, parts: Iterable[pa.Array]) -> Digests:
        """Those of texts of 64 hexadecimal digits, in any order. Raises ValueError for other texts."""
        values = np.concatenate([np.zeros(0, f"S{SIZE}"), *map(_bytes_of, parts)])
        values.sort()
        return cls(pa.Array.from_buffers(pa.binary(SIZE), len(values), [None, pa.py_buffer(values)]))

    def __len__(self) -> int:
        return len(self.column)

    def holds(self, texts: pa.Array | pa.ChunkedArray) -> np.ndarray:
        """[N] bool: which of these texts are among them. Raises ValueError for a text that is no digest."""
        chunks = texts.chunks if isinstance(texts, pa.ChunkedArray) else [texts]
        wanted = np.concatenate([np.zeros(0, f"S{SIZE}"), *map(_bytes_of, chunks)])
        at = np.searchsorted(self._sorted, wanted)
        found = at < len(self._sorted)
        found[found] = self._sorted[at[found]] == wanted[found]
        return found


def _bytes_of(texts: pa.Array) -> np.ndarray:
    """NumPy leaves out zeros at the end of such bytes, which changes no order of those that are equally long."""
    digits = texts.cast(pa.binary(2 * SIZE))
    of_all = digits.buffers()[1].slice(digits.offset * 2 * SIZE, len(digits) * 2 * SIZE)
    return np.frombuffer(binascii.unhexlify(of_all), f"S{SIZE}")

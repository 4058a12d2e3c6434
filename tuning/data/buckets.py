"""Rows of numbers by a hash, many more than memory holds: equal hashes meet in one bucket, and buckets are in order.

added     | rows | rows | rows | ...              sorted by hash once they are `PENDING_BYTES`
on disk   | 0 1 2 .. 63 | 0 1 2 .. 63 | ...       each run's rows of bucket 0, of bucket 1, ...
read      | all rows of 0 | all rows of 1 | ...   a 64th of all at a time
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

HASH_BITS = 60
"""Of hashes: those of `rlhf.tuning.data.overlap.hash64`."""
BUCKETS = 64
PENDING_BYTES = 1 << 25
"""Of rows that are held until they are written."""


class Buckets:
    """Rows that are added once, then read once or more."""

    def __init__(self, path: Path, pending: int | None = None, **others: type):
        """path: of the file, which is made anew and only where there are many rows. others: columns beside `hash`.

        pending: bytes that are held until they are written, by default `PENDING_BYTES`.
        """
        self._path, self._kind = path, np.dtype([("hash", np.uint64), *others.items()])
        self._pending = PENDING_BYTES if pending is None else pending
        self._held: list[np.ndarray] = []
        self._runs: list[np.ndarray] = []
        """Of each run on disk where its buckets begin and end, in rows of the file."""
        path.unlink(missing_ok=True)

    def add(self, hashes: np.ndarray, **others: np.ndarray) -> None:
        """Adds rows. hashes: [N] uint64. others: [N] of each further column.

        Raises ValueError for a hash of 2^60 or more, which would be in no bucket.
        """
        if len(hashes) and int(hashes.max()) >> HASH_BITS:
            raise ValueError(f"a hash is {int(hashes.max())}; expected less than 2^{HASH_BITS}: take `overlap.hash64`")
        rows = np.empty(len(hashes), self._kind)
        columns: Mapping[str, np.ndarray] = {"hash": hashes, **others}
        for name, values in columns.items():
            rows[name] = values
        self._held.append(rows)
        if sum(held.nbytes for held in self._held) >= self._pending:
            self._flush()

    def __iter__(self) -> Iterator[np.ndarray]:
        """The rows of each bucket; every hash of one is smaller than those of the next."""
        if not self._runs:
            # Few rows are one bucket, and no file.
            yield self._joined(self._held)
            return
        self._flush()
        mapped = np.memmap(self._path, self._kind, "r")
        for bucket in range(BUCKETS):
            yield self._joined([mapped[edges[bucket] : edges[bucket + 1]] for edges in self._runs])

    def _joined(self, pieces: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.empty(0, self._kind), *pieces])

    def _flush(self) -> None:
        rows = self._joined(self._held)
        self._held = []
        bucket = rows["hash"] >> np.uint64(HASH_BITS - BUCKETS.bit_length() + 1)
        order = np.argsort(bucket, kind="stable")
        with self._path.open("ab") as file:
            start = file.tell() // self._kind.itemsize
            rows[order].tofile(file)
        self._runs.append(start + np.searchsorted(bucket[order], np.arange(BUCKETS + 1)))

"""Weights on their way to a server, as buckets; and the fingerprint of weights. Both sides use it; nothing loads JAX.

    bucket := bytes behind this head (4), their CRC-32 (4) | length of the header (4) | header | data
    header := JSON list of pieces: name, dtype, shape of the tensor, first row, row behind the last

Numbers are little-endian and unsigned. A piece is a range of a tensor's rows, its first axis, so that no tensor is too
large for a bucket. The data are those of the pieces, one behind the other, in C order as in safetensors files.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

HEAD = struct.Struct("<II")
LENGTH = struct.Struct("<I")
SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number of each type that travels."""
BUCKET_BYTES = 16 * 2**20
"""Data of a bucket, at most."""
HEADER_BYTES = 2**20
"""Room for its header."""


class BrokenBucket(ValueError):
    """A bucket that is cut, changed on its way, or none at all."""


class Kind(NamedTuple):
    """Type and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * SIZES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Piece(NamedTuple):
    """Rows of a tensor."""

    name: str
    kind: Kind
    first: int
    last: int
    """The row behind the last one."""

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return (self.last - self.first) * self.kind.row_bytes


class Fingerprint:
    """SHA-256 over names, types, shapes and bytes of tensors, in whatever order they come."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, value: np.ndarray) -> None:
        """Adds a tensor, in C order."""
        self.add_bytes(name, Kind(value.dtype.name, value.shape), _bytes(value))

    def add_bytes(self, name: str, kind: Kind, data: memoryview | bytearray) -> str:
        """Adds a tensor by its bytes; returns their SHA-256."""
        digest = hashlib.sha256(data).hexdigest()
        self._lines.append(f"{name} {kind} {digest}\n")
        return digest

    def hexdigest(self) -> str:
        """The fingerprint of what was added."""
        return hashlib.sha256("".join(sorted(self._lines)).encode()).hexdigest()


def buckets(
    tensors: Iterable[tuple[str, np.ndarray]], most: int = BUCKET_BYTES, seen: Fingerprint | None = None
) -> Iterator[bytes]:
    """Tensors, in C order, as buckets of at most `most` bytes of data. One tensor and one bucket are held at a time.

    seen: gets every tensor. Raises ValueError for a tensor one row of which is larger than that.
    """
    pieces: list[tuple[Piece, memoryview]] = []
    room = most
    for name, value in tensors:
        if seen is not None:
            seen.add(name, value)
        kind, data, first = Kind(value.dtype.name, value.shape), _bytes(value), 0
        if kind.row_bytes > most:
            raise ValueError(f"{name}: a row has {kind.row_bytes} bytes, and a bucket {most}")
        while first < value.shape[0]:
            last = min(value.shape[0], first + room // kind.row_bytes)
            if last > first:
                part = data[first * kind.row_bytes : last * kind.row_bytes]
                pieces.append((Piece(name, kind, first, last), part))
                room -= len(part)
            first = last
            if first < value.shape[0]:
                yield _written(pieces)
                pieces, room = [], most
    if pieces:
        yield _written(pieces)


def opened(bucket: bytes) -> list[tuple[Piece, memoryview]]:
    """The pieces of a bucket with their bytes. Raises BrokenBucket."""
    whole = memoryview(bucket)
    if len(whole) < HEAD.size + LENGTH.size:
        raise BrokenBucket(f"the bucket has {len(whole)} bytes: it was cut")
    length, checksum = HEAD.unpack_from(whole)
    rest = whole[HEAD.size :]
    if length != len(rest):
        raise BrokenBucket(f"the bucket has {len(rest)} bytes behind its head, which says {length}: it was cut")
    if zlib.crc32(rest) != checksum:
        raise BrokenBucket(f"the checksum of the bucket's {length} bytes is not the one in its head: send it again")
    (size,) = LENGTH.unpack_from(rest)
    try:
        pieces = [
            Piece(str(name), Kind(str(dtype), tuple(map(int, shape))), int(first), int(last))
            for name, dtype, shape, first, last in json.loads(bytes(rest[LENGTH.size : LENGTH.size + size]))
        ]
        sizes = [piece.nbytes for piece in pieces]
    except (ValueError, TypeError, KeyError) as error:
        raise BrokenBucket(f"the bucket's header is no list of pieces ({type(error).__name__}: {error})") from error
    data = rest[LENGTH.size + size :]
    if sum(sizes) != len(data) or any(piece.first < 0 or piece.nbytes <= 0 for piece in pieces):
        raise BrokenBucket(f"the bucket's pieces have {sum(sizes)} bytes by its header, and {len(data)} follow")
    parts, at = [], 0
    for piece, nbytes in zip(pieces, sizes, strict=True):
        parts.append((piece, data[at : at + nbytes]))
        at += nbytes
    return parts


def first_difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    """The first name, in order, under which two mappings have not the same; None where they are equal."""
    return next((n for n in sorted({*ours, *theirs}) if n not in ours or ours.get(n) != theirs.get(n, ...)), None)


def _written(pieces: list[tuple[Piece, memoryview]]) -> bytes:
    named = [[p.name, p.kind.dtype, list(p.kind.shape), p.first, p.last] for p, _ in pieces]
    header = json.dumps(named, separators=(",", ":")).encode()
    parts: list[bytes | memoryview] = [LENGTH.pack(len(header)), header, *(data for _, data in pieces)]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([HEAD.pack(sum(map(len, parts)), checksum), *parts])


def _bytes(value: np.ndarray) -> memoryview:
    """The bytes of an array in C order, without a copy where it is in that order."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data

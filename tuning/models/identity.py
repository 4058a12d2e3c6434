"""The identity of a policy: a digest of its parameters' names, types, shapes and values, computed from their shards.

The last two axes of a parameter are cut into a fixed grid of blocks, up to 256 an axis. Each process of a group hashes
the blocks of its own devices, in threads and a row of the grid at a time; the processes share the digests of rows.
Equal values give an equal digest on every mesh and number of processes. A parameter with shards that are not made of
whole blocks (an axis of 768 over three devices) is copied to each host first.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from flax import nnx

from rlhf.tuning import multihost

BLOCKS = 256
"""The largest number of blocks along an axis; a power of two."""
PIECE_BYTES = 1 << 28
"""About how much of a shard is copied from a device to the host at a time."""
Part = tuple[int, int, str]
"""Row of blocks, first column in it and digest of the blocks of a row that one shard has."""


def fingerprint(params: Any) -> str:
    """Return the SHA-256 that identifies a policy, or a dictionary of trees.

    Every process of a group calls this at the same place.
    """
    named = jax.tree_util.tree_leaves_with_path(params if isinstance(params, dict) else nnx.to_pure_dict(params))
    leaves = sorted(((jax.tree_util.keystr(path), leaf) for path, leaf in named), key=lambda entry: entry[0])
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="fingerprint") as threads:
        own = [_parts(leaf, threads) for _, leaf in leaves]
    h = hashlib.sha256()
    for (name, leaf), parts in zip(leaves, zip(*multihost.gather(own), strict=True), strict=True):
        h.update(f"{name}{leaf.dtype}{leaf.shape}".encode())
        rows: dict[int, list[bytes]] = {}
        for row, _, digest in sorted(part for some in parts for part in some):
            rows.setdefault(row, []).append(bytes.fromhex(digest))
        for digests in rows.values():
            h.update(_merged(digests))
    return h.hexdigest()


def _parts(leaf: Any, threads: ThreadPoolExecutor) -> list[Part]:
    """The digests of the blocks that this process has, and that no other process hashes too."""
    if not leaf.size:
        return []
    shape = (1, 1, *leaf.shape)[-max(2, leaf.ndim) :]
    blocks = [size // math.gcd(size, BLOCKS) for size in shape[-2:]]
    return [
        (rows + i, columns, digest)
        for data, rows, columns in _shards(leaf, shape, blocks)
        for start, piece in _pieces(data, blocks[0])
        for i, digest in enumerate(
            threads.map(lambda at, piece=piece: _row(piece, at, blocks), range(piece.shape[-2] // blocks[0])),
            start // blocks[0],
        )
    ]


def _shards(leaf: Any, shape: tuple[int, ...], blocks: list[int]) -> Iterator[tuple[Any, int, int]]:
    """Arrays of at least two axes with their first row and column of blocks."""
    if not multihost.is_primary() and (not isinstance(leaf, jax.Array) or leaf.is_fully_addressable):
        # Each process has the same values: one hashes them.
        return
    if isinstance(leaf, jax.Array):
        part = (1, 1, *leaf.sharding.shard_shape(leaf.shape))[-len(shape) :]
        if part[:-2] == shape[:-2] and not any(n % block for n, block in zip(part[-2:], blocks, strict=True)):
            for shard in leaf.addressable_shards:
                # Of copies on several devices only one is hashed.
                if shard.replica_id == 0:
                    starts = (0, 0, *(at.indices(n)[0] for at, n in zip(shard.index, leaf.shape, strict=True)))[-2:]
                    data = shard.data if leaf.ndim > 1 else np.asarray(shard.data).reshape(part)
                    yield data, starts[0] // blocks[0], starts[1] // blocks[1]
            return
        leaf = multihost.to_host(leaf)
        if not multihost.is_primary():
            return
    yield np.asarray(leaf).reshape(shape), 0, 0


def _pieces(data: Any, block: int) -> Iterator[tuple[int, np.ndarray]]:
    """A shard in the host's memory, in pieces of whole rows of blocks with the index at which each begins."""
    if not isinstance(data, jax.Array) or {device.platform for device in data.devices()} == {"cpu"}:
        yield 0, np.asarray(data)
        return
    rows = data.shape[-2] // block
    count = math.gcd(rows, 1 << max(0, math.ceil(math.log2(data.nbytes / PIECE_BYTES))))
    size = data.shape[-2] // count
    for start in range(0, data.shape[-2], size):
        yield start, np.asarray(jax.lax.dynamic_slice_in_dim(data, start, size, data.ndim - 2))


def _row(piece: np.ndarray, row: int, blocks: list[int]) -> str:
    """The digest of a row of blocks."""
    rows, columns = blocks
    part = piece[..., row * rows : (row + 1) * rows, :]
    # One copy, with each block in one place.
    split = np.moveaxis(part.reshape(*part.shape[:-1], -1, columns), -2, 0)
    raw = np.ascontiguousarray(split).reshape(len(split), -1).view(np.uint8)
    return _merged([hashlib.sha256(block.data).digest() for block in raw]).hex()


def _merged(digests: list[bytes]) -> bytes:
    """The root of a binary tree of hashes: it is the same whether shards have merged parts of it or not."""
    while len(digests) > 1:
        digests = [hashlib.sha256(a + b).digest() for a, b in zip(digests[::2], digests[1::2], strict=True)]
    return digests[0]

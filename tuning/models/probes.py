"""Some parameters of a model, which measure the distance to another set of parameters.

A record has these of a policy that is not stored.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from rlhf.tuning import multihost

MOST = 2048
"""Probes of a tensor; a stack of layers is one."""

Probes = dict[str, np.ndarray]
"""Values [probes] by name of the tensor, in float64, each times sqrt(parameters / probes) of its tensor."""


def probes(params: Any) -> Probes:
    """Values at random places, which rest on names and shapes of tensors alone. Read where they are: nothing moves
    between devices. Of several processes each reads what its devices have."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(params))
    found = {jax.tree_util.keystr(path): _of_tensor(jax.tree_util.keystr(path), leaf) for path, leaf in leaves}
    if multihost.process_count() == 1:
        return {name: values for name, (values, _) in found.items()}
    # As bytes: without float64 a device would lose digits.
    raw = np.concatenate([part.view(np.uint8) for values, known in found.values() for part in (values, known)])
    others = np.asarray(multihost_utils.process_allgather(raw)).reshape(-1, raw.size)
    at, out = 0, {}
    for name, (values, _) in found.items():
        middle, end = at + values.nbytes, at + values.nbytes + values.size
        for other in others:
            known = other[middle:end].view(bool)
            values[known] = other[at:middle].copy().view(np.float64)[known]
        at, out[name] = end, values
    return out


def distance(one: Probes, other: Probes) -> float:
    """An estimate of the Euclidean distance of two sets of parameters; exact where a tensor has few.

    Raises ValueError where they have other tensors.
    """
    if one.keys() != other.keys():
        raise ValueError(f"two models: {sorted(one.keys() ^ other.keys())[:4]} are in one of them alone")
    return math.sqrt(sum(float(np.square(one[name] - other[name]).sum()) for name in one))


def _of_tensor(name: str, leaf: Any) -> tuple[np.ndarray, np.ndarray]:
    """The probes of a tensor, and which of them are on the devices of this process."""
    size = math.prod(leaf.shape)
    count = min(size, MOST)
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))
    flat = np.arange(size) if size <= MOST else rng.integers(0, size, count)
    places = np.unravel_index(flat, leaf.shape)
    values, known = np.zeros(count), np.zeros(count, bool)
    for shard in jax.numpy.asarray(leaf).addressable_shards:
        starts, stops = zip(*(at.indices(n)[:2] for at, n in zip(shard.index, leaf.shape, strict=True)), strict=True)
        local = [axis - start for axis, start in zip(places, starts, strict=True)]
        inside = np.all(
            [(at >= 0) & (at < stop - start) for at, start, stop in zip(local, starts, stops, strict=True)], 0
        )
        if inside.any():
            found = shard.data[tuple(at[inside] for at in local)]
            values[inside] = np.asarray(found).astype(np.float64)
            known |= inside
    return values * math.sqrt(size / count), known

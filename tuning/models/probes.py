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

from rlhf.tuning import multihost

MOST = 2048
"""Probes of a tensor; a stack of layers is one."""

Probes = dict[str, np.ndarray]
"""Values [probes] by name of the tensor, in float64, each times sqrt(parameters / probes) of its tensor."""


def probes(params: Any) -> Probes:
    """Values at random places, which depend on names and shapes of tensors alone. Each process reads what its devices
    have; nothing moves between devices."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(params))
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    found = {name: np.zeros(min(math.prod(leaf.shape), MOST)) for name, leaf in named.items()}
    for part in multihost.gather({name: _of_tensor(name, leaf) for name, leaf in named.items()}):
        for name, (numbers, values) in part.items():
            found[name][numbers] = values
    return found


def distance(one: Probes, other: Probes) -> float:
    """An estimate of the Euclidean distance of two sets of parameters; exact where a tensor has few.

    Raises ValueError where they have other tensors.
    """
    if one.keys() != other.keys():
        raise ValueError(f"two models: {sorted(one.keys() ^ other.keys())[:4]} are in one of them alone")
    return math.sqrt(sum(float(np.square(one[name] - other[name]).sum()) for name in one))


def _of_tensor(name: str, leaf: Any) -> tuple[list[int], list[float]]:
    """Numbers and values of the probes of a tensor that are on the devices of this process."""
    size = math.prod(leaf.shape)
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))
    flat = np.arange(size) if size <= MOST else rng.integers(0, size, MOST)
    places, weight = np.unravel_index(flat, leaf.shape), math.sqrt(size / len(flat)) if size else 1.0
    numbers: list[int] = []
    values: list[float] = []
    for shard in jax.numpy.asarray(leaf).addressable_shards:
        ranges = [at.indices(n) for at, n in zip(shard.index, leaf.shape, strict=True)]
        local = [axis - start for axis, (start, *_) in zip(places, ranges, strict=True)]
        here = [(at >= 0) & (at < stop - start) for at, (start, stop, _) in zip(local, ranges, strict=True)]
        inside = np.flatnonzero(np.all(here, 0))
        if len(inside):
            numbers += inside.tolist()
            found = shard.data[tuple(at[inside] for at in local)]
            values += (np.asarray(found).astype(np.float64) * weight).tolist()
    return numbers, values

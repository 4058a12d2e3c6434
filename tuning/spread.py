"""Arrays that several processes have a part of each: their values on the host, and those of one process on all.

Every process must call these at the same place of the program: they are collectives.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tuning import ranks


def whole(value: Any) -> np.ndarray:
    """The values of an array on the host, on each process."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated:
        return np.asarray(value)
    return np.asarray(multihost_utils.process_allgather(value, tiled=True))


def from_first(value: np.ndarray) -> np.ndarray:
    """The array that process 0 has, on every process; the others give one of its shape and type. Bits are kept."""
    if ranks.here().size == 1:
        return value
    # As bytes: it is a sum with zeros, in which -0.0 would become 0.0.
    given = np.ascontiguousarray(value)
    sent = np.asarray(multihost_utils.broadcast_one_to_all(given.reshape(-1).view(np.uint8)))
    return sent.view(given.dtype).reshape(given.shape)


def everywhere(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """An array of which each process knows some values, which are equal where several do; on every process."""
    if ranks.here().size == 1:
        return values
    # As bytes: without float64 a gathered array would lose digits.
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    found = np.asarray(multihost_utils.process_allgather(raw)).reshape(-1, raw.size).copy()
    masks = np.asarray(multihost_utils.process_allgather(known.astype(np.uint8))).reshape(-1, known.size)
    out = values.copy()
    for one, mask in zip(found, masks, strict=True):
        out[mask > 0] = one.view(values.dtype)[mask > 0]
    return out

"""The processes of a group under their earlier names (`tuning.multihost`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tuning import multihost


class _Here:
    @property
    def rank(self) -> int:
        return multihost.process_index()

    @property
    def size(self) -> int:
        return multihost.process_count()


def here() -> _Here:
    """This process in its group."""
    return _Here()


is_lead = multihost.is_primary


def from_lead(make: Callable[[], Any]) -> Any:
    """The JSON value that `make` gives on process 0, on every process."""
    return multihost.from_primary(make)


def array_from_lead(make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array that `make` gives on process 0, on every process."""
    if multihost.process_count() == 1:
        return make()
    made = make() if multihost.is_primary() else np.zeros(0)
    dtype, shape = multihost.from_primary(lambda: [made.dtype.str, list(made.shape)])
    raw = multihost.bytes_from_primary(lambda: np.ascontiguousarray(made).tobytes())
    return np.frombuffer(raw, np.dtype(dtype)).reshape(shape)


def least(value: int) -> int:
    """The smallest of the values that the processes have."""
    return int(min(multihost.gather(value)))

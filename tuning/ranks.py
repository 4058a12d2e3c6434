"""The processes that compute one stage together, and what they tell each other beside the devices' collectives.

Each of them, a rank, runs the same code on the same values. What one alone knows (a file of the work folder, a finished
completion) it shares; everybody asks for that at the same place of the program. Nothing here loads JAX.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np


class Ranks(Protocol):
    """This process among those that compute together."""

    rank: int
    """Its number; 0 is the lead, which alone writes what is kept."""
    size: int
    """How many there are."""

    def share(self, owner: int, value: Any) -> Any:
        """The JSON value of the rank `owner`, on every rank; the value that others give is not looked at."""

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, in their order, on every rank."""


class _Alone:
    """One process."""

    rank, size = 0, 1

    def share(self, owner: int, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]


ALONE: Ranks = _Alone()
_now = ALONE


def here() -> Ranks:
    """This process and those beside it; alone unless `use` was called."""
    return _now


def use(ranks: Ranks | None) -> None:
    """Makes this process one of several, or with None one alone."""
    global _now
    _now = ranks or ALONE


def is_lead() -> bool:
    """Whether this process writes what is kept."""
    return _now.rank == 0


def from_lead(make: Callable[[], Any]) -> Any:
    """The JSON value that `make` gives on the lead, where alone it is called, on every rank."""
    return _now.share(0, make() if is_lead() else None)


def array_from_lead(make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array that `make` gives on the lead, where alone it is called, on every rank."""
    return make() if _now.size == 1 else unpacked(from_lead(lambda: packed(make())))


def least(value: int) -> int:
    """The smallest of the values that the ranks have."""
    return int(min(_now.gather(value)))


def packed(array: np.ndarray) -> list[Any]:
    """An array as JSON."""
    return [array.dtype.str, list(array.shape), base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()]


def unpacked(value: list[Any]) -> np.ndarray:
    """The array of `packed`."""
    dtype, shape, text = value
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype)).reshape(shape)

"""Repeats calls with transient failures, such as those over a network, after pauses that double."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

BUSY = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed later."""


def pause(attempt: int, first_seconds: float, longest_seconds: float = float("inf")) -> float:
    """Seconds to wait after attempt number `attempt` (from 0): doubled with each try, up to a limit."""
    return min(first_seconds * 2**attempt, longest_seconds)


def retried(
    action: Callable[[], T], *, tries: int, first_seconds: float, passing: Callable[[Exception], bool] = lambda e: True
) -> T:
    """The result of `action`, which is called up to `tries` times.

    passing: whether an error is transient. Raises the error of the last try, or at once an error that is not transient.
    """
    for attempt in range(tries - 1):
        try:
            return action()
        except Exception as error:
            if not passing(error):
                raise
        time.sleep(pause(attempt, first_seconds))
    return action()

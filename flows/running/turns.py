"""Who has a worker: one stage at a time, and in between what fills its time and gives way."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

CHECK_SECONDS = 1.0
TELL_SECONDS = 10.0
"""A wait that lasts so long is told of."""


class Turn:
    """Of one worker."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken, self._at = False, ""
        """Whether somebody has it, and what it does for whoever has it."""
        self._waiting = 0

    @property
    def is_wanted(self) -> bool:
        """Whether a stage waits for it."""
        return self._waiting > 0

    @contextlib.contextmanager
    def of_stage(
        self, check_time: Callable[[], None], tell: Callable[[str], None] = lambda line: None
    ) -> Iterator[None]:
        """Within it the worker is a stage's.

        check_time: called each second of the wait; what it raises ends that. tell: gets a line where the wait lasts.
        """
        began, told = time.monotonic(), False
        with self._changed:
            self._waiting += 1
            try:
                while not self._changed.wait_for(lambda: not self._taken, CHECK_SECONDS):
                    check_time()
                    if not told and time.monotonic() - began >= TELL_SECONDS:
                        told = True
                        tell(f"waits for its worker, {self._at}")
                self._taken, self._at = True, "which makes another stage"
            finally:
                self._waiting -= 1
        try:
            yield
        finally:
            self._give()

    @contextlib.contextmanager
    def between(self, seconds: float) -> Iterator[bool]:
        """Within it the worker is the caller's, who is to give way to stages, where none has it or waits for it within
        so many seconds; whether it is."""
        with self._changed:
            found = self._changed.wait_for(lambda: not self._taken and not self._waiting, seconds)
            if found:
                self._taken, self._at = True, "which ends calls that were begun ahead, each within its own limit"
        try:
            yield found
        finally:
            if found:
                self._give()

    def _give(self) -> None:
        with self._changed:
            self._taken = False
            self._changed.notify_all()

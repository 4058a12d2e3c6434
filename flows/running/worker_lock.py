"""Who has a worker: one stage at a time."""

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
        self._taken = threading.Lock()

    @contextlib.contextmanager
    def of_stage(
        self, check_time: Callable[[], None], tell: Callable[[str], None] = lambda line: None
    ) -> Iterator[None]:
        """Within it the worker is a stage's.

        check_time: called each second of the wait; what it raises ends that. tell: gets a line where the wait lasts.
        """
        began, told = time.monotonic(), False
        while not self._taken.acquire(timeout=CHECK_SECONDS):
            check_time()
            if not told and time.monotonic() - began >= TELL_SECONDS:
                told = True
                tell("waits for its worker, which makes another stage")
        try:
            yield
        finally:
            self._taken.release()

"""Stacks of the threads of a process that makes no progress, and of those with which it works."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable


def write_on_request(also: Callable[[], None]) -> None:
    """At SIGUSR1 writes the stacks of this process to its log, and calls `also`.

    In a thread: the main one may be in a collective, in which it runs no handler of Python's.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # Without a handler of Python's the descriptor is not written to.
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)

    def watch() -> None:
        while numbers := os.read(reading, 64):
            if signal.SIGUSR1 in numbers:
                also()

    threading.Thread(target=watch, name="stacks", daemon=True).start()

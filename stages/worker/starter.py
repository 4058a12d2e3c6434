"""Starts processes from a thread that lives as long as this process.

The kernel can end a process with its parent (`PR_SET_PDEATHSIG` of prctl(2)), and takes the end of the thread that
started it for the parent's death: threads that run stages come and go.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable


def in_lasting_thread(action: Callable[[], None]) -> None:
    """Runs an action in that thread; what it raises is raised here. An interrupted caller leaves when it has ended."""
    done, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            action()
        except BaseException as e:
            errors.append(e)
        done.set()

    _actions(os.getpid()).put(run)
    try:
        done.wait()
    except BaseException:
        # What it starts is there to be ended.
        done.wait()
        raise
    if errors:
        raise errors[0]


@functools.cache
def _actions(process: int) -> queue.SimpleQueue[Callable[[], None]]:
    """What the thread of this process is to do: a forked one has none of its parent's threads."""
    actions = queue.SimpleQueue[Callable[[], None]]()

    def work() -> None:
        while True:
            actions.get()()

    threading.Thread(target=work, name="worker-starter", daemon=True).start()
    return actions

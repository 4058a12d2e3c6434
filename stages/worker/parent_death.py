"""Ends a worker together with the process that has started it.

The kernel can end a process with its parent (`PR_SET_PDEATHSIG` of prctl(2)), and takes the end of the thread that
started it for the parent's death. Threads that run stages come and go, so workers are started from a thread that lives
as long as its process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable

PARENT_SECONDS = 0.5


def die_with_parent(parent: int) -> None:
    """End this process when its parent dies: a thread polls for that, and on Linux the kernel signals it too, also
    while no thread of Python can run. It takes the end of the thread that started this process for the parent's death
    (`in_lasting_thread`)."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG of <sys/prctl.h>.
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)

    def watch() -> None:
        # An orphan gets another parent.
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def in_lasting_thread(action: Callable[[], None]) -> None:
    """Run an action in that thread, and raise its error. An interrupted caller waits for its end."""
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
        # The caller has to end the process that it starts.
        done.wait()
        raise
    if errors:
        raise errors[0]


@functools.cache
def _actions(process: int) -> queue.SimpleQueue[Callable[[], None]]:
    """Return the queue of the thread of this process; a forked process needs another thread."""
    actions = queue.SimpleQueue[Callable[[], None]]()

    def work() -> None:
        while True:
            actions.get()()

    threading.Thread(target=work, name="worker-starter", daemon=True).start()
    return actions

"""The end of a process with the one that has started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PARENT_SECONDS = 0.5


def die_with_parent(parent: int) -> None:
    """Ends this process when its parent dies: a thread polls for that, and on Linux the kernel signals it too, also
    while no thread of Python can run. It takes the end of the thread that started this process for the parent's death
    (`stages.worker.starter`)."""
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

"""Run a command in its own process group, and end all its processes when the command ends or its owner dies.

Processes that a server starts would survive a kill -9 of the server or of its owner. The owner holds the other end of
this process's standard input: when the owner dies, the pipe closes. Linux's PDEATHSIG ends only direct children. This
file runs as a script and imports nothing of this project.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRADER = "RLHF_GRADER_FD"
"""Names a descriptor that only the command may read; it is closed here."""
CHILD_SUBREAPER = 36
"""From <linux/prctl.h>."""
GRACE_SECONDS = 5.0
"""From SIGTERM to SIGKILL."""


def group_alive(group: int) -> bool:
    """Return whether any process of the group is left, processes of other users excepted."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def orphans(child: int) -> list[int]:
    """Return processes that the command has left running, and reap those that have ended. Linux only."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    others = [int(pid) for pid in path.read_text().split() if int(pid) != child] if path.exists() else []
    return [pid for pid in others if os.waitpid(pid, os.WNOHANG)[0] == 0]


def main() -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(CHILD_SUBREAPER, 1, 0, 0, 0)
    passed = [int(os.environ[GRADER])] if GRADER in os.environ else []
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=passed)
    for one in passed:
        os.close(one)
    while child.poll() is None:
        orphans(child.pid)
        ready, _, _ = select.select([0], [], [], 0.2)
        if ready and not os.read(0, 1):
            break
    deadline = time.monotonic() + GRACE_SECONDS
    for number in (signal.SIGTERM, signal.SIGKILL):
        if group_alive(child.pid):
            os.killpg(child.pid, number)
        while time.monotonic() < deadline and (child.poll() is None or group_alive(child.pid)):
            orphans(child.pid)
            time.sleep(0.05)
        deadline = time.monotonic() + 1.0
    status = child.wait() & 0xFF
    # Such as a browser in another session.
    while (left := orphans(child.pid)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return status


if __name__ == "__main__":
    sys.exit(main())

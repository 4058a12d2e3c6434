"""Runs a command in a process group of its own and ends the whole group when the command or whoever asked is gone.

A server starts processes of its own, which a kill -9 of the server or of its owner would leave behind. The owner holds
the other end of this process's standard input: its end, however it comes, is read here. Run as a script: nothing of
this project is imported.
"""

import os
import select
import signal
import subprocess
import sys
import time

GRACE_SECONDS = 5.0


def group_alive(group: int) -> bool:
    """Whether any process of the group is left."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main() -> int:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    while child.poll() is None:
        ready, _, _ = select.select([0], [], [], 0.2)
        if ready and not os.read(0, 1):
            break
    deadline = time.monotonic() + GRACE_SECONDS
    for number in (signal.SIGTERM, signal.SIGKILL):
        if group_alive(child.pid):
            os.killpg(child.pid, number)
        while time.monotonic() < deadline and (child.poll() is None or group_alive(child.pid)):
            time.sleep(0.05)
        deadline = time.monotonic() + 1.0
    return child.wait() & 0xFF


if __name__ == "__main__":
    sys.exit(main())

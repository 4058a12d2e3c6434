"""Targets of pools that go wrong as their payload says."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

LOADED_IN = os.getpid()


class Target:
    """Does what the payload names; a session counts its jobs."""

    def __init__(self, mark: str = "") -> None:
        self.mark, self.count = mark, 0

    @staticmethod
    def load(mark: str = "") -> None:
        if mark == "exit at import":
            os._exit(3)
        if mark == "no import":
            raise ImportError("no such package")
        if mark == "thread":
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

    def __call__(self, payload):
        self.count += 1
        do, argument = payload["do"], payload.get("with")
        return getattr(self, do)(argument)

    def close(self) -> None:
        if self.mark.startswith("/"):
            Path(self.mark).touch()

    def size(self, values):
        return len(values)

    def echo(self, value):
        return value

    def counted(self, _):
        return self.count

    def fail(self, _):
        raise RuntimeError("no such room")

    def leave(self, _):
        sys.exit("enough")

    def end(self, _):
        os._exit(3)

    def crash(self, _):
        os.kill(os.getpid(), signal.SIGSEGV)

    def allocate(self, megabytes):
        return len(bytearray(megabytes * 2**20))

    def fork(self, seconds):
        """The forked copy returns later than the job, with another value."""
        if os.fork() == 0:
            time.sleep(seconds)
            return "the copy"
        return "the job"

    def sleep(self, seconds):
        time.sleep(seconds)
        return seconds

    def spin(self, _):
        sum(iter(int, 1))

    def large(self, characters):
        return "x" * characters

    def mute(self, _):
        os.closerange(3, 256)
        time.sleep(600)

    def forge(self, text):
        (stream,) = (fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and _is_socket(fd))
        os.write(stream, text.encode() + b"\n")
        time.sleep(600)

    def killed(self, path):
        with open(path, "a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)

    def start(self, _):
        """A process that leaves the session and the group."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def start_and_end(self, path):
        Path(path).write_text(str(self.start(None)))
        os._exit(0)

    def where(self, _):
        score = Path("/proc/self/oom_score_adj").read_text().strip()
        first = Path("/proc/self/environ").read_text().split("\0")
        started = dict(line.split("=", 1) for line in first if line)
        with tempfile.NamedTemporaryFile(delete=False) as file:
            return {
                "pid": os.getpid(), "host": os.getppid(), "loaded": LOADED_IN, "oom": score, "file": file.name,
                "environment": dict(os.environ), "started": started,
            }  # fmt: skip


def _is_socket(descriptor: int) -> bool:
    try:
        socket.socket(fileno=os.dup(descriptor)).close()
    except OSError:
        return False
    return True

"""What a command takes with all of its processes: bytes, processor seconds and memory (Linux)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

SET_CHILD_SUBREAPER = 36
SECONDS = 0.25
"""Between two looks at the memory."""


class Memory:
    """The peak resident size, in MB, of a process and all below it; a page that several share counts once."""

    def __init__(self, pid: int = 0):
        """pid: this process, if it is left out."""
        self.pid, self.peak, self.stop = pid or os.getpid(), 0.0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.stop.wait(SECONDS):
            self.peak = max(self.peak, memory_of(self.pid))

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()


def watched(command: Sequence[str]) -> dict[str, float]:
    """Runs a command to its end and says what it took, with all processes that it started.

    Bytes are those of system calls, without pages of mapped files. Raises CalledProcessError where it fails.
    """
    # Processes whose parents have ended become children of this one: no process is left out.
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    bytes_before, cpu_before, began = _bytes_of_children(), _cpu_of_children(), time.monotonic()
    process = subprocess.Popen(command)
    with Memory(process.pid) as memory:
        process.wait()
        seconds = time.monotonic() - began
        _reap()
        # While the thread is there: what it has read is its own.
        read, written = (after - before for after, before in zip(_bytes_of_children(), bytes_before, strict=True))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    cpu = _cpu_of_children() - cpu_before
    found = {"read_mb": read / 1e6, "written_mb": written / 1e6, "processor_seconds": cpu, "seconds": seconds}
    return {name: round(value, 1) for name, value in (found | {"memory_mb": memory.peak}).items()}


def memory_of(pid: int) -> float:
    """MB of a process and all below it."""
    import psutil

    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return 0.0
    for one in processes:
        try:
            lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            # It has ended meanwhile.
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def _bytes_of_children() -> tuple[int, int]:
    """Bytes read and written by children that have ended, with theirs: all of this process but its own threads'."""

    def of(path: Path) -> tuple[int, int]:
        values = dict(line.split(": ") for line in path.read_text().splitlines())
        return int(values["rchar"]), int(values["wchar"])

    me = Path("/proc/self")
    own = [of(thread / "io") for thread in (me / "task").iterdir()]
    read, written = of(me / "io")
    return read - sum(r for r, _ in own), written - sum(w for _, w in own)


def _cpu_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _reap() -> None:
    """Waits for processes that the command has left. Raises TimeoutError where one does not end."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.1)
        except ChildProcessError:
            return
    raise TimeoutError("a process of the command is still there a minute after its end")

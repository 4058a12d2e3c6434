"""What a command takes with all of its processes: files opened, bytes, processor seconds and memory (Linux)."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

SHIM = Path(__file__).with_name("opens.c")
SET_CHILD_SUBREAPER = 36
SECONDS = 0.25
"""Between two looks at the memory."""


@dataclasses.dataclass(frozen=True)
class Taken:
    """Of a command and all processes that it started."""

    opens: Mapping[str, int]
    """Files opened for reading and writing, by what `kind` says of their paths."""
    read_bytes: int
    """By system calls. Pages of mapped files are not in it."""
    written_bytes: int
    processor_seconds: float
    seconds: float
    memory_mb: float
    """The peak of the resident size; a page that several processes share counts once."""
    anonymous_mb: float
    """The peak of what is no page of a file."""


def shim(folder: Path) -> Path:
    """The library that counts opens, compiled."""
    library = folder / "opens.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SHIM)], check=True)
    return library


def watched(command: Sequence[str], below: Path, folder: Path, kind: Callable[[str], str]) -> Taken:
    """Runs a command to its end and says what it took.

    below: where opens are counted. folder: for the count itself. kind: of a path relative to `below`.
    Raises CalledProcessError where the command fails.
    """
    # Processes whose parents have ended become children of this one: no process is left out.
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    log = folder / "opens"
    log.write_text("")
    more = {"LD_PRELOAD": str(shim(folder)), "RLHF_OPENS": str(log), "RLHF_OPENS_BELOW": f"{below}/"}
    bytes_before, cpu_before, began = _bytes_of_children(), _cpu_of_children(), time.monotonic()
    process = subprocess.Popen(command, env=os.environ | more)
    resident, anonymous = 0.0, 0.0
    while process.poll() is None:
        now = memory_of(process.pid)
        resident, anonymous = max(resident, now[0]), max(anonymous, now[1])
        time.sleep(SECONDS)
    seconds = time.monotonic() - began
    _reap()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    read, written = (after - before for after, before in zip(_bytes_of_children(), bytes_before, strict=True))
    opens = collections.Counter(kind(line[2:]) for line in log.read_text().splitlines())
    cpu = _cpu_of_children() - cpu_before
    return Taken(dict(sorted(opens.items())), read, written, cpu, seconds, resident, anonymous)


def memory_of(pid: int) -> tuple[float, float]:
    """MB of a process and all below it: resident, and of that not of files."""
    import psutil

    total = [0, 0]
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return 0.0, 0.0
    for one in processes:
        try:
            lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            # It has ended meanwhile.
            continue
        for number, name in enumerate(("Pss:", "Pss_Anon:")):
            total[number] += sum(int(line.split()[1]) for line in lines if line.startswith(name))
    return total[0] / 1024, total[1] / 1024


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

"""The parent's side of the worker: starts it for the first request, sends requests, and reports its death."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from rlhf.stages.common.xla_flags import with_flags
from rlhf.stages.worker import interpreter
from rlhf.stages.worker.devices import device_kind
from rlhf.stages.worker.parent_death import in_lasting_thread
from rlhf.stages.worker.protocol import Changed, Done, Event, Failed, Heartbeat, Report, Request, parse_event
from rlhf.tuning import multihost

# A worker sends a heartbeat every two seconds: after this time without one it counts as stopped.
SILENCE_SECONDS = 600.0
LONGEST_BEAT_SECONDS = 60.0
"""Maximum that a wait for a heartbeat counts: Ctrl-Z may have stopped parent and worker for hours until `fg`."""
PIPE_BYTES = 1 << 16
"""Bytes of a request that are sent at a time."""
STACK_SECONDS = 1.0
"""Time that a worker has to write the stacks of its threads before it is ended."""
COMPILING = 3
"""Factor of `limits.stall_seconds` for compilations: some take an hour, and none reports progress."""
WAIT_SECONDS = 1.0
"""Time of one wait for an event."""
RESUMES = "  finished stages, shards and checkpoints are kept; the same command goes on from there"
LOG_LINES = 8
"""Lines of the log in the error of a dead worker."""
# For glibc's allocator: transparent huge pages by madvise.
HUGE_PAGES = "glibc.malloc.hugetlb=1"


def worker_environment(group: bool = False) -> dict[str, str]:
    """Return the environment of a process that computes: flags of XLA for its devices, and large arrays on huge pages.

    group: whether the process is one of a process group.

    A train step allocates and frees gigabytes; with pages of 4 KiB a quarter of its time goes to page faults. Systems
    other than glibc 2.35 and newer ignore the setting. Variables of the user stay.
    """
    platform = ""
    # If JAX finds no device, the process itself reports it.
    with contextlib.suppress(RuntimeError):
        platform = device_kind().partition(":")[0]
    environment = with_flags(os.environ, platform, group)
    # A scheduler may have described a group to the flow's process, of which its workers are not a part.
    # Stages do not use Prefect: only the flow gets the keys of its server.
    for name in (multihost.ADDRESS, multihost.COUNT, multihost.INDEX, "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY"):
        environment.pop(name, None)
    # Else transformers reports in each process that torch, which is not needed, is not installed.
    environment.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    tunables = environment.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        environment["GLIBC_TUNABLES"] = f"{tunables}:{HUGE_PAGES}".strip(":")
    return environment


class StageFailed(RuntimeError):
    """The stage raised an exception; the worker still runs."""


class StageOutage(StageFailed):
    """A service, a disk or the machine failed the stage: the same request may succeed later."""


class CodeChanged(StageFailed):
    """Code was edited during the run: a fresh worker has to load it, and the stage gets another key."""


class WorkerDied(RuntimeError):
    """The worker process ended during a stage; a new one resumes from checkpoints and finished shards."""


def any_time() -> None:
    """The check of a run without a time limit."""


class Stall:
    """The time since a worker's last report."""

    def __init__(self, limit: float | None):
        self._limit = limit
        self._still = self._compiling = 0.0

    def add(self, event: object, seconds: float) -> str | None:
        """Count the seconds of a wait for an event; return the reason to end the worker, or None."""
        seconds = min(seconds, LONGEST_BEAT_SECONDS)
        match event:
            # A stage that hangs between compilations has both kinds: only a report ends the count.
            case Heartbeat(compiling=True):
                self._compiling += seconds
            case Heartbeat():
                self._still += seconds
            case _:
                self._still = self._compiling = 0.0
        if self._limit is None or self._still + self._compiling / COMPILING <= self._limit:
            return None
        what = f"made no progress for {self._limit:g} s (`limits.stall_seconds`)"
        if self._compiling > self._still:
            what = f"compiled for {COMPILING * self._limit:g} s ({COMPILING} times `limits.stall_seconds`)"
        return f"{what}, and was ended"


def size_of(log: Path) -> int:
    """Return the bytes of a worker's log; 0 without one."""
    return log.stat().st_size if log.exists() else 0


def last_lines(log: Path, begin: int) -> str:
    """Return the end of a worker's log, of the bytes from `begin`, as the last part of an error."""
    tail = ""
    if log.exists():
        with log.open(errors="replace") as f:
            f.seek(begin)
            tail = "".join(f"\n    {line.rstrip()}" for line in deque(f, maxlen=LOG_LINES))
    return f"{RESUMES}\n  log: {log}{tail}"


class Worker:
    """A worker process that is started by the first request and stays warm until `close`."""

    def __init__(
        self,
        log: Path,
        stall_seconds: float | None = None,
        stage_seconds: float | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ):
        """log: file of its output, until a request names another. stall_seconds: time that a stage may report nothing,
        `COMPILING` times as long while it compiles. stage_seconds: time that a stage may take. variables: further
        variables of its environment."""
        self.log = log
        self.variables = variables
        self.stall_seconds = stall_seconds
        self.stage_seconds = stage_seconds
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: int = -1
        self._unsent = b""
        self._events: int = -1
        self._buffer = b""
        self._cause = ""
        self._check_time: Callable[[], None] = any_time
        self._busy = 0.0
        self._begin = 0

    @property
    def where(self) -> str:
        """The process, for messages."""
        return f"pid {self.pid} on {socket.gethostname()}"

    @property
    def pid(self) -> int | None:
        """The process id of the running or last worker; None before the first."""
        return self._process.pid if self._process is not None else None

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        request_read, request_write = os.pipe()
        event_read, event_write = os.pipe()
        arguments = ["--parent", str(os.getpid()), "--requests", str(request_read), "--events", str(event_write)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                interpreter.command("rlhf.stages.worker.process", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(request_read, event_write),
                env=worker_environment(multihost.in_group(self.variables)) | dict(self.variables),
            )
        # The worker has these ends. An event pipe still open for writing here would hide its death.
        os.close(request_read)
        os.close(event_write)
        # A request may be larger than the pipe: it is sent while waiting for events.
        os.set_blocking(request_write, False)
        self._requests = request_write
        self._events = event_read
        self._buffer = self._unsent = b""
        self.starts += 1

    def run(
        self, request: Request, on_event: Callable[[Report], None], check_time: Callable[[], None] = any_time
    ) -> dict[str, Any]:
        """Run one stage and return its manifest.

        on_event: called with each progress report, log line and heartbeat of a compilation. check_time: called every
        second; an exception of it ends the worker, whose log gets the stacks, and is raised. Raises StageFailed with
        the stage's error (StageOutage for an outage), CodeChanged if the worker has other code than the request's key
        says (it is ended then), and WorkerDied if the process ends, sends nothing for SILENCE_SECONDS, reports nothing
        for `stall_seconds`, or takes longer than `stage_seconds`.
        """
        self._check_time, self._busy = check_time, 0.0
        self.log = Path(request.log or self.log)
        self._begin = size_of(self.log)
        if self._process is None or self._process.poll() is not None:
            self.close()
            # The kernel ends it with the thread that starts it.
            in_lasting_thread(self._start)
        try:
            self._unsent = request.line().encode()
            stall = Stall(self.stall_seconds)
            while True:
                since = time.monotonic()
                event = self._next_event()
                if (cause := stall.add(event, time.monotonic() - since)) is not None:
                    self._end(cause)
                match event:
                    case Done(manifest):
                        return manifest
                    case Failed(error, _, outage):
                        raise (StageOutage if outage else StageFailed)(f"{error}\n  traceback in {self.log}")
                    case Changed(what):
                        self.close()
                        raise CodeChanged(what)
                    case Heartbeat(compiling=False):
                        continue
                    case report:
                        on_event(report)
        except (BrokenPipeError, EOFError) as e:
            raise WorkerDied(self._obituary(request)) from e
        except BaseException as e:
            if not isinstance(e, StageFailed):
                # The events of an interrupted request are still to come: a new worker has clean pipes.
                self.kill()
            raise

    def _next_event(self) -> Event:
        """Wait for an event. Raises EOFError if the worker has ended, or was silent for too long and was killed."""
        silent = 0.0
        self._end_if_late()
        while b"\n" not in self._buffer:
            since = time.monotonic()
            sending = [self._requests] if self._unsent else []
            ready, writable, _ = select.select([self._events], sending, [], WAIT_SECONDS)
            waited = time.monotonic() - since
            self._busy += min(waited, LONGEST_BEAT_SECONDS)
            self._end_if_late()
            # A clock would count the time in which both processes were stopped.
            silent = 0.0 if ready or writable else silent + min(waited, WAIT_SECONDS)
            if silent >= SILENCE_SECONDS:
                self._end(f"sent nothing for {SILENCE_SECONDS:g} s, and was ended")
            if writable:
                sent = os.write(self._requests, self._unsent[:PIPE_BYTES])
                self._unsent = self._unsent[sent:]
            if ready:
                chunk = os.read(self._events, 1 << 16)
                # End of file: the worker has closed its end, which it does only by ending.
                if not chunk:
                    raise EOFError
                self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return parse_event(line)

    def _end_if_late(self) -> None:
        """End a worker whose stage or run has passed its limit. Raises EOFError, or the error of `check_time`."""
        try:
            self._check_time()
        except KeyboardInterrupt:
            raise
        except BaseException:
            self.write_stacks()
            raise
        if self.stage_seconds is not None and self._busy > self.stage_seconds:
            self._end(f"took longer than {self.stage_seconds:g} s (`limits.stage_seconds`), and was ended")

    def write_stacks(self) -> None:
        """Have the worker write the stacks of its threads to its log."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(STACK_SECONDS)

    def _end(self, cause: str) -> NoReturn:
        """End a worker that lives and does not make progress; its log gets the stacks of its threads."""
        self.write_stacks()
        self._cause = cause
        self.kill()
        raise EOFError

    def _obituary(self, request: Request) -> str:
        """Return the cause of the worker's end, the kept work, and the last lines of its log."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()
            code = -signal.SIGKILL
        cause, self._cause = self._cause, ""
        if not cause:
            cause = interpreter.end_of(code)
            if -code == signal.SIGKILL:
                cause += " (the kernel does this when memory runs out; `dmesg` tells)"
        who = f"the worker (pid {self._process.pid})"
        return f"{who} {cause} in stage {request.stage}\n{last_lines(self.log, self._begin)}"

    def kill(self) -> None:
        """End the worker at once; its stage can resume from the work folder."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def leave(self) -> None:
        """Close the request pipe, which ends the worker; `close` waits for that."""
        for pipe in (self._requests, self._events):
            if pipe >= 0:
                os.close(pipe)
        self._requests = self._events = -1

    def close(self) -> None:
        """End the worker."""
        self.leave()
        if self._process is None:
            return
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

"""A process group: several workers that compute each stage together (`rlhf.tuning.multihost`), with the interface of
one.

    run(request)  ->  member 0: Worker  ->  process 0 of JAX: reports, tables, the manifest
                  ->  member 1: Worker  ->  process 1 of JAX: the same stage on its own devices

The group sends the same request to each member, and forwards the reports of process 0. When a member fails, dies or
the group makes no progress, the group ends all of its processes: the others would wait for the lost one in a
collective. The next request starts a new group, which resumes from checkpoints and finished shards.
"""

from __future__ import annotations

import contextlib
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from rlhf.stages.worker.client import (
    LONGEST_BEAT_SECONDS,
    RESUMES,
    WAIT_SECONDS,
    CodeChanged,
    StageFailed,
    Worker,
    WorkerDied,
    any_time,
    last_lines,
    stall,
)
from rlhf.stages.worker.protocol import Done, Heartbeat, Log, Progress, Report, Request
from rlhf.tuning import multihost

GRACE_SECONDS = 3.0
"""After the first failure of a member: another one may be its cause."""
CONNECTION = re.compile(r"JaxRuntimeError: .*(Gloo|NCCL|[Cc]oordination service|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED)")
"""In an error of a process that has lost another one, whose end may be noticed later."""
COMPILING_SECONDS = 5.0
"""After a heartbeat that says so a member counts as compiling for this long; beats come every two seconds."""


class Member(Protocol):
    """One process of a group: a `rlhf.stages.worker.client.Worker`, or one on another host."""

    @property
    def logs(self) -> list[Path]: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def where(self) -> str: ...
    def run(
        self, request: Request, on_event: Callable[[Report], None], check_time: Callable[[], None]
    ) -> dict[str, Any]: ...
    def write_stacks(self) -> None: ...
    def kill(self) -> None: ...
    def leave(self) -> None: ...
    def close(self) -> None: ...


Start = Callable[[Callable[[str], None], Callable[[], None]], Sequence[Member]]
"""(log, check_time) -> the members of a new group."""


class _Ended(KeyboardInterrupt):
    """The group ends a member, as Ctrl-C does: without a word."""


class ProcessGroup:
    """The processes of one role. The first request starts them, and they stay warm until `close` or a failure."""

    def __init__(self, start: Start, log: Path, stall_seconds: float | None = None):
        """start: makes the members of a new group, without limits for a lack of progress.

        log: the file of the output of process 0. stall_seconds: time that all members together may report nothing;
        `client.COMPILING` times as long while one compiles.
        """
        self.log, self.stall_seconds, self.starts = log, stall_seconds, 0
        self._start, self._members = start, list[Member]()
        self._logs = [log]

    @property
    def logs(self) -> list[Path]:
        """The files of the output of all processes."""
        return self._logs

    def run(
        self, request: Request, on_event: Callable[[Report], None], check_time: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Runs one stage on all processes and returns the manifest; raises as `Worker.run`, and names the process."""
        if not self._members:
            self._members = list(self._start(lambda line: on_event(Log(line)), check_time or any_time))
            self._logs = [log for member in self._members for log in member.logs]
            self.starts += 1
        at_work = _AtWork(self._members, request)
        try:
            return self._manifest(at_work, on_event, check_time or any_time)
        except BaseException:
            at_work.end()
            self.close()
            raise

    def _manifest(
        self, at_work: _AtWork, on_event: Callable[[Report], None], check_time: Callable[[], None]
    ) -> dict[str, Any]:
        still = compiling = 0.0
        while len(at_work.made) + len(at_work.errors) < len(self._members):
            since = time.monotonic()
            report = at_work.next_report()
            check_time()
            if at_work.errors and time.monotonic() > at_work.failed + GRACE_SECONDS:
                break
            if report is not None and report[0] == 0:
                on_event(report[1])
            if report is not None and isinstance(report[1], Progress | Log):
                still = compiling = 0.0
                continue
            waited = min(time.monotonic() - since, LONGEST_BEAT_SECONDS)
            if at_work.is_compiling:
                compiling += waited
            else:
                still += waited
            if (cause := stall(self.stall_seconds, still, compiling)) is not None:
                self._end_stalled(at_work.request, cause)
        if 0 not in at_work.made:
            self._raise(at_work.errors)
        if at_work.errors:
            # The artifact is committed; the next request needs a whole group.
            number, error = next(iter(at_work.errors.items()))
            on_event(Log(f"{self._named(number)} failed after the artifact was committed: {error}"))
            at_work.end()
            self.close()
        return at_work.made[0]

    def _named(self, number: int) -> str:
        return f"process {number} of {len(self._members)} ({self._members[number].where})"

    def _raise(self, errors: Mapping[int, BaseException]) -> NoReturn:
        """Raises the error that is the cause of the others: a death, then an edit, then the error of process 0."""

        def order(number: int) -> tuple[bool, bool, bool, bool]:
            error = errors[number]
            lost = CONNECTION.search(str(error)) is not None
            return not isinstance(error, WorkerDied), not isinstance(error, CodeChanged), lost, number != 0

        # Of equal ones the first: the order of a mapping is that of arrival.
        number = min(errors, key=order)
        error = errors[number]
        if isinstance(error, StageFailed) and CONNECTION.search(str(error)):
            raise WorkerDied(f"{self._named(number)} lost its connection to the others: {error}\n{RESUMES}") from error
        if isinstance(error, WorkerDied) or (isinstance(error, StageFailed) and number != 0):
            raise type(error)(f"{self._named(number)}: {error}") from error
        raise error

    def _end_stalled(self, request: Request, cause: str) -> NoReturn:
        for member in self._members:
            member.write_stacks()
        names = ", ".join(member.where for member in self._members)
        raise WorkerDied(f"the process group ({names}) {cause} in stage {request.stage}\n{last_lines(self.log)}")

    def leave(self) -> None:
        """Has all processes leave; `close` waits for that."""
        for member in self._members:
            member.leave()

    def close(self) -> None:
        """Ends all processes."""
        self.leave()
        with contextlib.ExitStack() as ends:
            for member in self._members:
                ends.callback(member.close)
        self._members = []


class _AtWork:
    """A request that all members run, each in a thread."""

    def __init__(self, members: Sequence[Member], request: Request):
        self.request = request
        self.made: dict[int, dict[str, Any]] = {}
        self.errors: dict[int, BaseException] = {}
        """By process, in the order of arrival."""
        self.failed = 0.0
        """When the first one failed, by `time.monotonic`."""
        self._members = members
        self._reports: queue.SimpleQueue[tuple[int, Report | Done | BaseException]] = queue.SimpleQueue()
        self._compiling: dict[int, float] = {}
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=[number], name=f"process-{number}", daemon=True)
            for number in range(len(members))
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        def check_time() -> None:
            if self._over.is_set():
                raise _Ended

        try:
            made = self._members[number].run(
                self.request, lambda report: self._reports.put((number, report)), check_time
            )
            self._reports.put((number, Done(made)))
        except BaseException as e:
            self._reports.put((number, e))

    def next_report(self) -> tuple[int, Report] | None:
        """A report and the number of its process; None after WAIT_SECONDS without one, and after an end."""
        try:
            number, found = self._reports.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            return None
        if isinstance(found, Done):
            self.made[number] = found.manifest
            return None
        if isinstance(found, BaseException):
            self.failed = self.failed or time.monotonic()
            self.errors[number] = found
            return None
        if isinstance(found, Heartbeat):
            self._compiling[number] = time.monotonic()
        return number, found

    @property
    def is_compiling(self) -> bool:
        """Whether a member compiles."""
        return any(time.monotonic() - at < COMPILING_SECONDS for at in self._compiling.values())

    def end(self) -> None:
        """Ends the processes at once, and waits for the threads."""
        self._over.set()
        for member in self._members:
            member.kill()
        for thread in self._threads:
            thread.join()


def local_group(
    count: int,
    log: Path,
    stall_seconds: float | None = None,
    stage_seconds: float | None = None,
    variables: Sequence[Mapping[str, str]] = ({},),
) -> ProcessGroup:
    """A group of `count` processes of this machine. variables: of each one's environment, or of all where it is one."""

    def start(log_line: object, check_time: object) -> list[Worker]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        members = []
        for number in range(count):
            own = {**variables[number % len(variables)], **multihost.variables(address, count, number)}
            members.append(Worker(log_of_process(log, number), None, stage_seconds, own))
        return members

    return ProcessGroup(start, log, stall_seconds)


def log_of_process(log: Path, number: int) -> Path:
    """The file of the output of a group's process: `log` itself for process 0."""
    return log if number == 0 else log.with_name(f"{log.stem}-{number}{log.suffix}")

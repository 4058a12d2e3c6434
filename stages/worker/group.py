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
import dataclasses
import math
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from rlhf.stages.worker.client import (
    RESUMES,
    WAIT_SECONDS,
    CodeChanged,
    StageFailed,
    Stall,
    Worker,
    WorkerDied,
    any_time,
    last_lines,
    size_of,
)
from rlhf.stages.worker.protocol import Done, Heartbeat, Log, Progress, Report, Request
from rlhf.tuning import multihost

GRACE_SECONDS = 3.0
"""Time after the first failure of a member in which another one may report the cause."""
CONNECTION = re.compile(r"JaxRuntimeError: .*(Gloo|NCCL|[Cc]oordination service|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED)")
"""Errors of a process that has lost another one, whose end may be noticed later."""
COMPILING_SECONDS = 5.0
"""Time that a member counts as compiling after such a heartbeat; beats come every two seconds."""


class Member(Protocol):
    """One process of a group: a `rlhf.stages.worker.client.Worker`, or one on another host."""

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
    """Ends a member as Ctrl-C does, without a message."""


class ProcessGroup:
    """The processes of one role. The first request starts them, and they stay warm until `close` or a failure."""

    def __init__(self, start: Start, log: Path, stall_seconds: float | None = None):
        """start: makes the members of a new group, without limits for a lack of progress.

        log: the file of the output of process 0, until a request names another. stall_seconds: time that all members
        together may report nothing; `client.COMPILING` times as long while one compiles.
        """
        self.log, self.stall_seconds, self.starts = log, stall_seconds, 0
        self._start, self._members = start, list[Member]()
        self._begin = 0

    def run(
        self, request: Request, on_event: Callable[[Report], None], check_time: Callable[[], None] = any_time
    ) -> dict[str, Any]:
        """Run one stage on all processes and return the manifest; raises as `Worker.run`, and names the process."""
        self.log = Path(request.log or self.log)
        self._begin = size_of(self.log)
        if not self._members:
            self._members = list(self._start(lambda line: on_event(Log(line)), check_time))
            self.starts += 1
        over, events = threading.Event(), queue.SimpleQueue[tuple[int, Report | Done | BaseException]]()

        def check_over() -> None:
            if over.is_set():
                raise _Ended

        def work(number: int, member: Member) -> None:
            own = dataclasses.replace(request, log=str(log_of_process(self.log, number)))
            try:
                manifest = member.run(own, lambda report: events.put((number, report)), check_over)
                events.put((number, Done(manifest)))
            except BaseException as e:
                events.put((number, e))

        threads = [threading.Thread(target=work, args=item, daemon=True) for item in enumerate(self._members)]
        for thread in threads:
            thread.start()
        try:
            made, errors = self._results(request, events, on_event, check_time)
            if 0 not in made:
                self._raise(errors)
            if not errors:
                return made[0]
            number, error = next(iter(errors.items()))
            on_event(Log(f"{self._named(number)} failed after the artifact was committed: {error}"))
        except BaseException:
            self._end(over, threads)
            raise
        # The next request needs a whole group.
        self._end(over, threads)
        return made[0]

    def _results(
        self,
        request: Request,
        events: queue.SimpleQueue[tuple[int, Report | Done | BaseException]],
        on_event: Callable[[Report], None],
        check_time: Callable[[], None],
    ) -> tuple[dict[int, dict[str, Any]], dict[int, BaseException]]:
        """Return manifests and errors by process; errors in the order of arrival."""
        made, errors = dict[int, dict[str, Any]](), dict[int, BaseException]()
        stall, failed, compiling = Stall(self.stall_seconds), math.inf, -math.inf
        while len(made) + len(errors) < len(self._members):
            since = time.monotonic()
            number, event = 0, None
            with contextlib.suppress(queue.Empty):
                number, event = events.get(timeout=WAIT_SECONDS)
            check_time()
            now = time.monotonic()
            match event:
                case Done(manifest):
                    made[number] = manifest
                case BaseException():
                    errors[number], failed = event, min(failed, now)
                case Heartbeat():
                    compiling = now
                    if number == 0:
                        on_event(event)
                case Progress() | Log() if number == 0:
                    on_event(event)
            if now > failed + GRACE_SECONDS:
                break
            is_report = isinstance(event, Progress | Log)
            beat = event if is_report else Heartbeat(compiling=now - compiling < COMPILING_SECONDS)
            if (cause := stall.add(beat, now - since)) is not None:
                for member in self._members:
                    member.write_stacks()
                names = ", ".join(member.where for member in self._members)
                raise WorkerDied(
                    f"the process group ({names}) {cause} in stage {request.stage}\n{last_lines(self.log, self._begin)}"
                )
        return made, errors

    def _end(self, over: threading.Event, threads: Sequence[threading.Thread]) -> None:
        over.set()
        for member in self._members:
            member.kill()
        for thread in threads:
            thread.join()
        self.close()

    def _named(self, number: int) -> str:
        return f"process {number} of {len(self._members)} ({self._members[number].where})"

    def _raise(self, errors: Mapping[int, BaseException]) -> NoReturn:
        """Raise the error that caused the others: a death, then an edit, then the error of process 0."""

        def order(number: int) -> tuple[bool, bool, bool, bool]:
            error = errors[number]
            lost = CONNECTION.search(str(error)) is not None
            return not isinstance(error, WorkerDied), not isinstance(error, CodeChanged), lost, number != 0

        # The first of equal ones, in the order of arrival.
        number = min(errors, key=order)
        error = errors[number]
        if isinstance(error, StageFailed) and CONNECTION.search(str(error)):
            raise WorkerDied(f"{self._named(number)} lost its connection to the others: {error}\n{RESUMES}") from error
        if isinstance(error, WorkerDied) or (isinstance(error, StageFailed) and number != 0):
            raise type(error)(f"{self._named(number)}: {error}") from error
        raise error

    def leave(self) -> None:
        """Close the request pipes of all processes; `close` waits for their end."""
        for member in self._members:
            member.leave()

    def close(self) -> None:
        """End all processes."""
        self.leave()
        with contextlib.ExitStack() as ends:
            for member in self._members:
                ends.callback(member.close)
        self._members = []


def local_group(
    count: int,
    log: Path,
    stall_seconds: float | None = None,
    stage_seconds: float | None = None,
    variables: Sequence[Mapping[str, str]] = ({},),
) -> ProcessGroup:
    """Return a group of `count` processes of this machine. variables: of each environment, or one for all."""

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
    """Return the file of the output of a group's process: `log` itself for process 0."""
    return log if number == 0 else log.with_name(f"{log.stem}-{number}{log.suffix}")

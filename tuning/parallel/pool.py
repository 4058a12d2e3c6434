"""Jobs in, results out: the owner's side of hosts on this machine, or on the nodes of a Ray cluster.

    with Pool("package.module:Target", {"size": 3}) as pool:
        for job, result in pool.run([Job({"text": "a"}, seconds=5.0), Job({"text": "b"}, seconds=5.0)]):
            print(job.payload, result.value, result.failure)

A target is a class: `load(**arguments)` imports what it needs, once in each host; `Target(**arguments)` is made once in
each child; calling it with the payload of a job returns the job's value; `close()` ends it. Arguments, payloads and
values are JSON. Jobs of a session go to one child, which is forked for that session alone; others go to any child.

RLHF_CLUSTER, the address of a Ray cluster, selects its nodes. Not Ray's or the standard library's pools: these neither
kill a task at its deadline with all that it has started, nor limit its memory.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Literal, Protocol, TypeVar

from rlhf.tuning.parallel.children import cores
from rlhf.tuning.parallel.host import TRIES, difference
from rlhf.tuning.parallel.local import Deliver, Local

CLUSTER = "RLHF_CLUSTER"
"""The environment variable with the address of a Ray cluster."""

Kind = Literal["error", "timeout", "crash", "killed", "refused"]
"""Why a job has no value:

    error      the target raised
    timeout    the job took longer than its seconds
    crash      the child ended by itself, or with its host if it was of a session
    killed     the child was killed from outside, as often as a job is tried
    refused    the target was not imported or made, so that the job was not begun
"""
T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger(__name__)


class Refused(RuntimeError):
    """The target cannot be imported, or no host runs: no job would be begun."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A job of a pool."""

    payload: Any
    """JSON that the target is called with."""
    seconds: float
    """Wall-clock limit, from the moment at which a child has it and has made the target."""
    megabytes: int = 2048
    """Memory in addition to the child's memory before the job, or before the first job of its session."""
    session: int | None = None
    """The session; None: any child."""
    label: Any = None
    """The caller's name for it."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a job has no value."""

    kind: Kind
    message: str


@dataclasses.dataclass(frozen=True)
class Result:
    """The value of a job, or its failure."""

    value: Any = None
    failure: Failure | None = None


class Host(Protocol):
    """Where children are forked: this machine, or a node."""

    name: str
    blocks: int

    def send(self, messages: Sequence[Mapping[str, Any]]) -> None: ...
    def close(self) -> None: ...


@dataclasses.dataclass(eq=False)
class _State:
    """A host as its pool knows it."""

    host: Host
    processes: int = 0
    """Stateless children that it may have; 0 until it is ready."""
    jobs: set[int] = dataclasses.field(default_factory=set)
    steps: set[int] = dataclasses.field(default_factory=set)
    """Jobs of its sessions."""
    sessions: set[int] = dataclasses.field(default_factory=set)

    @property
    def room(self) -> int:
        return self.processes * self.host.blocks - len(self.jobs)


class Pool:
    """Jobs of one target. Not for several threads."""

    def __init__(self, target: str, arguments: Mapping[str, Any], processes: int | None = None) -> None:
        """processes: children for stateless jobs on this machine; None: one a core. A node has one a CPU of its own."""
        self._settings = {"target": target, "arguments": dict(arguments), "processes": processes or cores()}
        self._cluster = os.environ.get(CLUSTER)
        self._news: queue.SimpleQueue[tuple[Any, dict[str, Any]]] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._jobs: dict[int, tuple[Job, int]] = {}
        """Jobs without a result, and how often each may still be tried."""
        self._waiting: collections.deque[int] = collections.deque()
        """Jobs that no host has."""
        self._results: list[tuple[Job, Result]] = []
        self._lost: set[int] = set()
        """Sessions whose host is gone."""
        self._states = self._open()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, job: Job) -> None:
        """Give a job to a host, or queue it until one has room; `poll` returns its result. Raises Refused."""
        self.wait_until_ready()
        number = next(self._numbers)
        self._jobs[number] = job, TRIES
        if job.session is None:
            self._waiting.append(number)
            self._deal()
        else:
            self._give(number, job.session)

    def poll(self, seconds: float) -> list[tuple[Job, Result]]:
        """Return the results since the last call; wait up to `seconds` for the first, and not if no job is under way.

        Returns early, without results, when a host becomes ready. Raises Refused.
        """
        deadline = time.monotonic() + seconds
        ready = self._ready
        while not self._results and self._jobs and self._ready <= ready:
            if not self._take_news(deadline - time.monotonic()):
                break
            self._deal()
        results, self._results = self._results, []
        return results

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Result]]:
        """Yield the jobs with their results as they arrive. Takes a job only when a host has room for it.

        Closing the iterator kills what is under way. Raises Refused.
        """
        left, exhausted = iter(jobs), False
        try:
            while not exhausted or self._jobs or self._results:
                self.wait_until_ready()
                while not exhausted and any(state.room > 0 for state in self._states):
                    if (job := next(left, None)) is not None:
                        self.submit(job)
                    exhausted = job is None
                yield from self.poll(float("inf"))
        finally:
            self._cancel()

    def end(self, session: int, seconds: float = 0.0) -> None:
        """End a session with all that it has started; a target at rest has `seconds` to close."""
        self._lost.discard(session)
        self._forget([number for number, (job, _) in self._jobs.items() if job.session == session])
        self._results = [(job, result) for job, result in self._results if job.session != session]
        for state in self._states:
            if session in state.sessions:
                state.sessions.discard(session)
                state.host.send([{"end": session, "seconds": seconds}])

    def close(self) -> None:
        """End all children."""
        for state in self._states:
            state.host.close()
        self._states.clear()

    def wait_until_ready(self) -> None:
        """Wait until a host has imported the target. Raises Refused."""
        self._check()
        while not self._ready:
            self._take_news(float("inf"))

    @property
    def _ready(self) -> int:
        return sum(state.processes > 0 for state in self._states)

    def _open(self) -> list[_State]:
        deliver: Deliver = lambda host, message: self._news.put((host, message))  # noqa: E731
        if self._cluster:
            from rlhf.tuning.parallel.cluster import open_nodes

            return [_State(node) for node in open_nodes(self._cluster, self._settings, deliver)]
        return [_State(Local(self._settings, deliver))]

    def _deal(self) -> None:
        """Give stateless jobs to the hosts with the most room, in one block for each."""
        blocks: dict[int, list[int]] = collections.defaultdict(list)
        while self._waiting:
            index, state = max(enumerate(self._states), key=lambda one: one[1].room)
            if state.room <= 0:
                break
            state.jobs.add(number := self._waiting.popleft())
            blocks[index].append(number)
        for index, numbers in blocks.items():
            self._states[index].host.send([self._message(number) for number in numbers])

    def _give(self, number: int, session: int) -> None:
        """Give a job of a session to the host of the session, or the first one to the host with the fewest."""
        if session in self._lost:
            self._settle(number, Result(failure=Failure("crash", "the process has ended with its host")))
            return
        ready = [state for state in self._states if state.processes]
        fewest = min(ready, key=lambda state: len(state.sessions) / state.processes)
        state = next((state for state in ready if session in state.sessions), fewest)
        first = session not in state.sessions
        state.sessions.add(session)
        state.steps.add(number)
        state.host.send([{**self._message(number), "first": first}])

    def _message(self, number: int) -> dict[str, Any]:
        job, tries = self._jobs[number]
        limits = {"seconds": job.seconds, "megabytes": job.megabytes, "tries": tries}
        return {"job": number, "payload": job.payload, "session": job.session, **limits}

    def _take_news(self, seconds: float) -> bool:
        """Take what hosts have sent; wait up to `seconds` for the first. False if there was nothing."""
        self._check()
        try:
            news = [self._news.get(timeout=min(max(seconds, 0.0), 1e6))]
        except queue.Empty:
            return False
        with contextlib.suppress(queue.Empty):
            while True:
                news.append(self._news.get_nowait())
        for host, message in news:
            state = next((state for state in self._states if state.host is host), None)
            if state is None:
                continue
            if "ready" in message and self._cluster and (other := difference(message["code"])) is not None:
                self._lose(state, {"refused": f"{host.name} is not used: {other}"})
            elif "ready" in message:
                state.processes = message["ready"]
            elif "job" in message:
                state.jobs.discard(message["job"])
                state.steps.discard(message["job"])
                failure = Failure(message["failure"], message["message"]) if "failure" in message else None
                self._settle(message["job"], Result(message.get("value"), failure))
            else:
                self._lose(state, message)
        return True

    def _lose(self, state: _State, message: Mapping[str, Any]) -> None:
        """A host is gone: stateless jobs go to others, and its sessions have crashed."""
        self._states.remove(state)
        state.host.close()
        if not state.processes and not self._states:
            raise Refused(message.get("refused") or f"its import ended the process ({message['lost']})")
        cause = message.get("lost") or message["refused"]
        how = f"the process ended with its host on {state.host.name} ({cause})"
        _log.warning("%s: %d jobs of it are tried again", how, len(state.jobs))
        self._lost |= state.sessions
        for number in sorted(state.jobs | state.steps):
            job, tries = self._jobs.get(number, (None, 0))
            if job is not None and job.session is not None:
                self._settle(number, Result(failure=Failure("crash", how)))
            elif job is not None and tries > 1:
                self._jobs[number] = job, tries - 1
                self._waiting.append(number)
            else:
                self._settle(number, Result(failure=Failure("killed", f"{how}, {TRIES} times")))
        if not self._states:
            self._states = self._open()

    def _check(self) -> None:
        if not self._states:
            raise Refused("no host runs: the pool is closed, or the cluster has no node")

    def _settle(self, number: int, result: Result) -> None:
        job, _ = self._jobs.pop(number, (None, 0))
        if job is not None:
            self._results.append((job, result))

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self._jobs[number]
        self._waiting = collections.deque(number for number in self._waiting if number in self._jobs)

    def _cancel(self) -> None:
        """Kill the children that have stateless jobs."""
        cancelled = [number for number, (job, _) in self._jobs.items() if job.session is None]
        self._forget(cancelled)
        self._results.clear()
        for state in self._states:
            if some := sorted(state.jobs.intersection(cancelled)):
                state.host.send([{"cancel": some}])
                state.jobs.difference_update(some)


def run_in_threads(function: Callable[[T], R], jobs: Iterable[T], most: int) -> Iterator[tuple[T, R]]:
    """Yield the jobs with the result of `function`, as they end, at most `most` at a time.

    For functions that only wait, such as for a server, and that end by themselves.
    """
    left = iter(jobs)
    busy: dict[Future[R], T] = {}
    pool = ThreadPoolExecutor(most, "job")
    try:
        while True:
            for job in itertools.islice(left, most - len(busy)):
                busy[pool.submit(function, job)] = job
            if not busy:
                return
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                yield busy.pop(future), future.result()
    finally:
        # If the caller has left, those under way end by their own limits.
        pool.shutdown(wait=False, cancel_futures=True)

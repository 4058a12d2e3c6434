"""Reward functions in processes that can be killed, with limits of time and memory for each call (R20).

A call gets one sample, a group or all of them, as its caller says. A process makes one call at a time and is used
again; one that passes its time is killed, and one that dies costs its call alone. Each has a pipe of its own, so that
no death reaches another.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, util
from typing import Any

from tuning.rewards import waiting
from tuning.rewards.calls import STARTED, Call, serve
from tuning.rewards.failures import Streak, check_failures
from tuning.rewards.functions import least_seconds
from tuning.rewards.samples import Outcome, Sample

LOAD_SECONDS = 600.0
"""Longest that a process may take to import a function."""
TRIES = 3
"""How often a call is made whose process is killed from outside."""

# Signals by which the kernel (out of memory) or a person ends a process; a function that crashes gets others.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

Finished = Callable[[Sequence[int], Sequence[Outcome]], None]
Leave = Callable[[], bool]
LEFT = Outcome(None, "not called, since its caller had left", "outage")
"""The outcome of a call that was not begun; this very object."""


def attempt(
    name: str,
    arguments: Mapping[str, Any],
    samples: Sequence[Sample],
    *,
    seconds: float,
    megabytes: int = 2048,
    workers: int = 2,
    max_concurrency: int = 32,
    calls: Sequence[Sequence[int]] | None = None,
    finished: Finished = lambda numbers, outcomes: None,
    leave: Leave = lambda: False,
) -> list[Outcome]:
    """The reward of each sample by the function `name` (`tuning.rewards.functions`), in order.

    Args:
        arguments: keyword arguments of the function.
        seconds, megabytes: limits of one call: wall-clock time after the function is imported, and memory on top of
            what its process already holds. Functions with limits of their own get the time that these need for all
            samples of the call (`tuning.rewards.functions.least_seconds`).
        workers: processes.
        max_concurrency: calls at a time of a built-in that waits for a server (`tuning.rewards.waiting`), and for which
            there is no process.
        calls: numbers of the samples that each call gets; None: one call a sample.
        finished: called with the numbers of a call's samples and their outcomes as soon as they are known.
        leave: asked before each call; once it says so no more are begun, those under way come to their end, and the
            others have the outcome `LEFT`, of which `finished` is not told.
    Returns:
        Outcomes. A call that exceeds a limit, raises, ends its process or gives no finite number costs its own samples.
        An outage (`Outcome.is_outage`) is no verdict: the caller must not keep it, and ends with `check_failures`.
        After OUTAGES of them in a row the remaining samples are outages too, without a call.
    """
    numbers = calls if calls is not None else [[number] for number in range(len(samples))]
    todo = [
        Call(name, arguments, [samples[i] for i in some], call_seconds(name, arguments, seconds, len(some)), megabytes)
        for some in numbers
    ]
    outcomes: dict[int, Outcome] = {}

    def told(call: int, found: Sequence[Outcome]) -> None:
        outcomes.update(zip(numbers[call], found, strict=True))
        finished(numbers[call], found)

    if name in waiting.WAITS:
        waiting.run(todo, max_concurrency, told, leave)
    else:
        _run(todo, _pool(workers), told, leave)
    return [outcomes.get(number, LEFT) for number in range(len(samples))]


def call_seconds(name: str, arguments: Mapping[str, Any], seconds: float, samples: int) -> float:
    """Wall-clock limit of a call with so many samples: `seconds`, or what the function's own limits add up to."""
    return max(seconds, samples * least_seconds(name, arguments))


def evaluate(
    name: str, arguments: Mapping[str, Any], samples: Sequence[Sample], *, seconds: float, **options: Any
) -> list[Outcome]:
    """As `attempt`, with its options, for a caller that keeps what it gets. Raises Outage where there is no verdict.

    The failures that it returns are the samples' own. Outcomes with neither value nor failure are of samples to which
    the function does not apply: they are not wrong, and leave means and rates (`tuning.rewards.failures.tallied`).
    """
    outcomes = attempt(name, arguments, samples, seconds=seconds, **options)
    check_failures({name: outcomes}, 1.0)
    return outcomes


def _run(
    calls: Sequence[Call], pool: list[_Process], told: Callable[[int, Sequence[Outcome]], None], leave: Leave
) -> None:
    """Makes all calls, each by the first process that is free, until it is to leave."""
    left = deque((number, TRIES) for number in range(len(calls)))
    busy: dict[_Process, tuple[int, int]] = {}
    streak = Streak()
    try:
        while left or busy:
            for process in pool:
                if left and process not in busy:
                    if leave():
                        left.clear()
                        break
                    number, tries = left.popleft()
                    if (untried := streak.untried) is not None:
                        told(number, [untried] * len(calls[number].samples))
                        continue
                    busy[process] = number, tries - 1
                    process.start(calls[number])
            _wait(list(busy))
            for process in list(busy):
                found = process.answer()
                if found is None:
                    continue
                number, tries = busy.pop(process)
                if process.was_killed and tries:
                    # Not at once: what needs more memory than there is beside the others may find it at the end.
                    left.append((number, tries))
                    continue
                streak.add(found)
                told(number, found)
    finally:
        # Interrupted, or `told` has raised: nobody waits for these any more.
        for process in busy:
            process.kill()


def _wait(busy: Sequence[_Process]) -> None:
    """Waits until a process answers, ends or passes its time."""
    if busy:
        nearest = min(process.deadline for process in busy) - time.monotonic()
        connection.wait([handle for process in busy for handle in process.handles], max(0.0, nearest))


class _Process:
    """A process that makes one call at a time; started when there is one, and again after its death."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None
        self._folder = ""
        self._call: Call | None = None
        self._started = False
        self.deadline = 0.0
        self.was_killed = False
        """Whether the last answer stands for a death from outside."""

    @property
    def handles(self) -> list[Any]:
        """What to wait for: an answer, or the end of the process, whose pipe a child of its own may hold open."""
        return [self._pipe, self._process.sentinel]

    def start(self, call: Call) -> None:
        """Sends a call."""
        self._call, self._started, self.was_killed = call, False, False
        self.deadline = time.monotonic() + LOAD_SECONDS
        # It may have died since its last call.
        if self._process is None or not self._process.is_alive():
            self.kill()
            self._spawn()
        with contextlib.suppress(OSError):
            # A death meanwhile is found by `answer`.
            self._pipe.send(call)

    def _spawn(self) -> None:
        # Spawned, never forked: the parent holds JAX and its threads.
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.mkdtemp(prefix="rlhf-reward-")
        self._pipe, theirs = context.Pipe()
        # A daemonic process could have no children, and a reward may use multiprocessing.
        self._process = context.Process(target=serve, args=(theirs, os.getpid(), self._folder), daemon=False)
        self._process.start()
        theirs.close()

    def answer(self) -> list[Outcome] | None:
        """The outcomes of the call, of which a death or too long a time is one; None where it goes on."""
        assert self._call is not None
        try:
            # Before the process's end is asked for: it may have answered and died.
            while self._pipe.poll():
                message = self._pipe.recv()
                if message != STARTED:
                    return list(message)
                self._started = True
                self.deadline = time.monotonic() + self._call.seconds
        except (EOFError, OSError):
            self._process.join(1.0)
        if not self._process.is_alive():
            return self._died()
        if time.monotonic() < self.deadline:
            return None
        self.kill()
        if self._started:
            return self._all(Outcome(None, f"timeout after {self._call.seconds:g} s"))
        reason = f"{self._call.function} was not imported within {LOAD_SECONDS:g} s"
        return self._all(Outcome(None, reason, "outage"))

    def _died(self) -> list[Outcome]:
        status = self._process.exitcode
        self.kill()
        if -status in _FROM_OUTSIDE:
            self.was_killed = True
            reason = f"the process was killed {TRIES} times from outside (status {status}), probably for want of memory"
            return self._all(Outcome(None, f"{reason}: lower workers, or the reward's megabytes", "outage"))
        return self._all(Outcome(None, f"process ended with status {status}", "sample" if self._started else "outage"))

    def _all(self, outcome: Outcome) -> list[Outcome]:
        assert self._call is not None
        return [outcome] * len(self._call.samples)

    def kill(self) -> None:
        """Ends the process and what its calls have started, and removes what they have left in its folder."""
        if self._process is None:
            return
        # It leads a process group, unless it is only starting.
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)


@functools.lru_cache(maxsize=4)
def _pool(workers: int) -> list[_Process]:
    """Processes that are used again as long as this one lives."""
    pool = [_Process() for _ in range(workers)]

    def close() -> None:
        for process in pool:
            process.kill()

    # Python waits for children that are no daemons as it ends: before that, and in forked or spawned parents too.
    util.Finalize(None, close, exitpriority=0)
    return pool

"""HTTP servers as an engine whose requests come and go one by one, as turns of episodes do."""

from __future__ import annotations

import itertools
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlhf.tuning.rollout.requests import Request, Update

WAIT_SECONDS = 0.05
"""Wait of a step for an answer, during which environments run."""


class Turns:
    """An engine with one thread for each running request. Servers cache earlier turns themselves."""

    broken = True
    """As of `Batches`: a request that has failed has tried every server, and others would too."""

    def __init__(self, answers: Any, limit: int):
        """answers: a `Fleet`, whose methods are called by several threads. limit: requests at a time."""
        self._answers, self._limit = answers, limit
        self._threads = ThreadPoolExecutor(limit, thread_name_prefix="turn")
        self._done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._open: set[int] = set()

    @property
    def idle(self) -> bool:
        """Whether no request is running."""
        return not self._open

    def slots_for(self, context: int) -> int:
        """Return the number of requests that can run at a time."""
        return self._limit

    def submit(self, request: Request) -> int:
        """Send a request and return its number. Raises RefusedRequest for one that the servers cannot serve."""
        self._answers.check(request)
        number = next(self._numbers)
        self._open.add(number)
        self._threads.submit(self._ask, number, request)
        return number

    def step(self) -> list[Update]:
        """Return the samples that have ended, after a short wait for the first. Raises the errors of servers."""
        ended: list[Update] = []
        try:
            while self._open:
                number, answer = self._done.get(timeout=0.0 if ended else WAIT_SECONDS)
                if number not in self._open:
                    continue
                self._open.discard(number)
                if isinstance(answer, BaseException):
                    raise answer
                ended += [Update(number, i, one.tokens, one.logps, one, one.top) for i, one in enumerate(answer)]
        except queue.Empty:
            pass
        return ended

    def cancel(self, number: int) -> None:
        """Drop the answer or error of a request."""
        self._open.discard(number)

    def abandon(self) -> None:
        """Drop the answers and errors of all running requests."""
        self._open.clear()

    def release(self, number: int) -> None:
        """Do nothing: servers manage their caches."""

    def close(self) -> None:
        """Send no further request, and wait for no answer."""
        self.abandon()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, number: int, request: Request) -> None:
        try:
            [(_, completions)] = self._answers.run([request])
            self._done.put((number, completions))
        except BaseException as e:
            self._done.put((number, e))

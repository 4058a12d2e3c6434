"""HTTP servers as an engine whose requests come and go one by one, as turns of episodes do."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from rlhf.tuning.rollout.requests import Completion, Request, Update

WAIT_SECONDS = 0.05
"""How long a step waits for an answer: environments have theirs meanwhile."""


class Answers(Protocol):
    """What answers requests, such as a `Fleet`; called by several threads at once."""

    def check(self, request: Request) -> None: ...
    def run(self, requests: Sequence[Request]) -> Iterable[tuple[int, list[Completion]]]: ...


class Turns:
    """One thread a request under way. What servers have cached of earlier turns is theirs to find."""

    def __init__(self, answers: Answers, most: int):
        """most: requests at a time."""
        self._answers, self._most = answers, most
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="turn")
        self._done: queue.SimpleQueue[tuple[int, list[Completion] | BaseException]] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._open: set[int] = set()

    @property
    def idle(self) -> bool:
        """Whether no answer is awaited."""
        return not self._open

    def slots_for(self, context: int) -> int:
        """Requests that can be under way."""
        return self._most

    def submit(self, request: Request) -> int:
        """Sends a request and returns its number. Raises RefusedRequest for one that the servers cannot serve."""
        self._answers.check(request)
        number = next(self._numbers)
        self._open.add(number)
        self._threads.submit(self._ask, number, request)
        return number

    def step(self) -> list[Update]:
        """The samples that have ended, after a short wait for the first. Raises what their servers raised."""
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
        """Its answer, or an error, which a server may still give, reaches nobody."""
        self._open.discard(number)

    def abandon(self) -> None:
        """No answer that is awaited now reaches anybody."""
        self._open.clear()

    def release(self, number: int) -> None:
        """Nothing: servers keep their caches as they see fit."""

    def close(self) -> None:
        """Sends nothing more, and waits for no answer."""
        self.abandon()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, number: int, request: Request) -> None:
        try:
            [(_, completions)] = self._answers.run([request])
            self._done.put((number, completions))
        except BaseException as e:
            self._done.put((number, e))

"""Runs that wait for a slot."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

import numpy as np

from rlhf.tuning.rollout.engine.pool import Pool
from rlhf.tuning.rollout.engine.slots import Run
from rlhf.tuning.rollout.requests import Request


class Waiting:
    """A queue of runs. Those that go on in a slot which is kept for them are in front, since the slot waits too.

    What a step asks of it is counted as runs come and go: a round has far more of them than slots.
    """

    def __init__(self) -> None:
        self.runs: collections.deque[Run] = collections.deque()
        self.longest = 0
        """Tokens that no prompt of these exceeds with its longest completion."""
        self._submitted = self._going_on = 0

    def __bool__(self) -> bool:
        return bool(self.runs)

    @property
    def fresh(self) -> int:
        """Runs that no slot is kept for."""
        return len(self.runs) - self._going_on

    def add(self, request: Request, keys: np.ndarray) -> int:
        """Adds the samples of a request, with their key data [samples, 2], and returns its number."""
        self._submitted += 1
        runs = [Run(self._submitted, s, request, keys[s]) for s in range(request.samples)]
        if request.after is not None:
            self.put_in_front(runs)
        else:
            self._count(runs)
            self.runs.extend(runs)
        return self._submitted

    def put_in_front(self, runs: Sequence[Run]) -> None:
        """Adds runs that are next, the last of them first."""
        self._count(runs)
        self.runs.extendleft(runs)

    def _count(self, runs: Sequence[Run]) -> None:
        self.longest = max([self.longest if self.runs else 0, *(run.request.total_tokens for run in runs)])
        self._going_on += sum(run.request.after is not None for run in runs)

    def seat(self, pool: Pool) -> None:
        """Gives slots to as many as there are slots for."""
        for run in pool.admit(self.runs, self.longest):
            self.runs.popleft()
            self._going_on -= run.request.after is not None

    def remove(self, numbers: Collection[int], pool: Pool) -> list[Run]:
        """Takes the runs of these requests out, with the slots that were kept for them."""
        removed = [run for run in self.runs if run.number in numbers]
        for run in removed:
            self.runs.remove(run)
            if run.request.after is not None:
                self._going_on -= 1
                # The caller knows the newest number alone, and this run has not taken over the slot kept for it.
                pool.release(run.request.after)
        return removed

    def clear(self) -> None:
        """Drops all of them."""
        self.runs.clear()
        self._going_on = 0

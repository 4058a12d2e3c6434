"""Runs that wait for a slot."""

from __future__ import annotations

import collections
from collections.abc import Collection

import numpy as np

from tuning.rollout.engine.pool import Pool
from tuning.rollout.engine.slots import Run
from tuning.rollout.requests import Request


class Waiting:
    """A queue of runs. Those that go on in a slot which is kept for them are in front, since the slot waits too."""

    def __init__(self) -> None:
        self.runs: collections.deque[Run] = collections.deque()
        self._submitted = 0

    def __bool__(self) -> bool:
        return bool(self.runs)

    @property
    def fresh(self) -> int:
        """Runs that no slot is kept for."""
        return sum(run.request.after is None for run in self.runs)

    def add(self, request: Request, keys: np.ndarray) -> int:
        """Adds the samples of a request, with their key data [samples, 2], and returns its number."""
        self._submitted += 1
        runs = [Run(self._submitted, s, request, keys[s]) for s in range(request.samples)]
        if request.after is not None:
            self.runs.extendleft(runs)
        else:
            self.runs.extend(runs)
        return self._submitted

    def seat(self, pool: Pool) -> None:
        """Gives slots to as many as there are slots for."""
        for _ in pool.admit(list(self.runs)):
            self.runs.popleft()

    def remove(self, numbers: Collection[int], pool: Pool) -> list[Run]:
        """Takes the runs of these requests out, with the slots that were kept for them."""
        removed = [run for run in self.runs if run.number in numbers]
        for run in removed:
            self.runs.remove(run)
            if run.request.after is not None:
                # The caller knows the newest number alone, and this run has not taken over the slot kept for it.
                pool.release(run.request.after)
        return removed

    def clear(self) -> None:
        """Drops all of them."""
        self.runs.clear()

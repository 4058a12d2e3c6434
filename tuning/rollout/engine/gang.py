"""Replicas on the devices of several ranks, which deal the same runs to the same engines as one process would.

Every rank runs the loop of `replicas`, with the engines of its own devices and stand-ins for the others. Before runs
are dealt it learns how full the others' engines are, and after a step which of their runs have ended: what is dealt
where follows from the same numbers everywhere, and so does what is sampled side by side.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, cast

import numpy as np

from tuning import ranks
from tuning.ranks import packed, unpacked
from tuning.rollout.engine.engine import Engine
from tuning.rollout.engine.placement import Place, owner_of
from tuning.rollout.engine.replicas import Replicas, engine_at
from tuning.rollout.requests import Completion, Request, Update


class Elsewhere:
    """Stands for an engine of another rank: it counts the runs that are dealt there, and numbers them as that does."""

    programs: tuple[str, ...] = ()
    context = math.inf
    cache_bytes = steps = room = 0

    def __init__(self) -> None:
        self.runs = 0
        self._submitted = 0

    @property
    def idle(self) -> bool:
        """Whether it has no runs."""
        return not self.runs

    def submit(self, request: Request, keys: np.ndarray | None = None) -> int:
        """Counts a run; its number there."""
        self.runs += 1
        self._submitted += 1
        return self._submitted

    def begin(self, crowded: bool = False) -> None:
        """Its rank begins the step."""

    def drop(self, number: int) -> None:
        """Counts a run that is given up."""
        self.runs -= 1

    def abandon(self) -> None:
        """Counts all of them as given up."""
        self.runs = 0

    def slots_for(self, context: int) -> int:
        """None of this process."""
        return 0

    def _open(self, requests: Sequence[Request]) -> None:
        pass

    def _close(self, numbers: Collection[int]) -> None:
        pass


class GangReplicas(Replicas):
    """`Replicas` over the devices of all ranks: each rank calls it in the same way, and gets every completion."""

    def _engine_at(self, place: Place, *arguments: Any, **options: Any) -> Engine:
        here = owner_of(place) == ranks.here().rank
        return engine_at(place, *arguments, **options) if here else cast(Engine, Elsewhere())

    def own(self) -> list[tuple[Engine, Place]]:
        return [(engine, place) for engine, place in super().own() if not isinstance(engine, Elsewhere)]

    def _finish(self, i: int) -> list[Update]:
        engine, owner = self._engines[i], owner_of(self._places[i])
        mine = not isinstance(engine, Elsewhere)
        ended = [update for update in engine.finish() if update.completion is not None] if mine else []
        told = ranks.here().share(owner, [_told(update) for update in ended])
        if isinstance(engine, Elsewhere):
            engine.runs -= len(told)
        return [_update(value) for value in told]

    def _rooms_and_loads(self) -> tuple[list[int], list[int]]:
        rooms, loads = super()._rooms_and_loads()
        owners = [owner_of(place) for place in self._places]
        mine = [[rooms[i], loads[i]] for i, owner in enumerate(owners) if owner == ranks.here().rank]
        # One message to the lead and one from it: each rank's in turn would be as many as pairs of ranks.
        for rank, told in enumerate(ranks.here().gather(mine)):
            theirs = [i for i, owner in enumerate(owners) if owner == rank]
            for i, (room, load) in zip(theirs, told, strict=True):
                rooms[i], loads[i] = room, load
        return rooms, loads


def _told(update: Update) -> list[Any]:
    """An ended run as JSON."""
    assert update.completion is not None
    c = update.completion
    arrays = packed(np.asarray(c.tokens, np.int32)), packed(np.asarray(c.logps, np.float64))
    return [update.number, update.sample, *arrays, c.stop, c.top]


def _update(value: list[Any]) -> Update:
    number, sample, tokens, logps, stop, top = value
    kept = [[(int(i), float(p)) for i, p in at] for at in top]
    return Update(number, sample, [], [], Completion(unpacked(tokens).tolist(), unpacked(logps).tolist(), stop, kept))

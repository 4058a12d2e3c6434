"""The runs of a sweep at the same time, as threads that share workers and stages.

Each run works as it would alone, with three differences:

- One run makes a stage that several runs have. The others make their next stages meanwhile, and read it then.
- As many runs proceed as there are workers. A run lends its worker while others make all of its next stages. Of the
  waiting runs, the one with the longest chain of stages ahead is next, then the one whose stage most runs have.
- Its lines begin with its name.

`graphlib` orders a graph that is known from the start; here a run decides by results which stages it makes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import ContextVar, copy_context

from rlhf.flows.graph.build import Node
from rlhf.flows.graph.sweep import Need
from rlhf.flows.running.crew import Crew

LOOK_SECONDS = 1.0


class Sharing:
    """The workers that runs share, and the stages that they make."""

    def __init__(self, crews: Sequence[Crew], needs: Mapping[str, Mapping[str, Need]]):
        """needs: of each run's nodes; equal needs are of equal stages (`rlhf.flows.graph.sweep.needs_of`)."""
        self.crews, self._needs = crews, needs
        self.stopped = threading.Event()
        """Ends all runs as interrupted, within seconds."""
        self._changed = threading.Condition()
        # A crew has a place for each of its workers.
        self._free = list(crews) * len(crews[0].names)
        self.lines_alternate = len(self._free) > 1
        self._places: dict[str, Crew] = {}
        self._at_work: set[Need] = set()
        """The stages that runs are making."""
        self._waiting: dict[str, Need] = {}
        """The next stages of the runs that lack only a place."""

    def run_all(self, jobs: Mapping[str, Callable[[], bool]]) -> list[str]:
        """Do the jobs of runs in threads, each when there is a place; return the runs whose job returns False.

        After an exception all runs end, and it is raised.
        """
        pending = sorted(jobs, key=lambda run: -len(self._needs[run]))
        at_work: dict[Future[bool], str] = {}
        failed = []
        with ThreadPoolExecutor(len(pending) or 1, "run") as pool:
            try:
                while pending or at_work:
                    if pending and self._begins(pending[0]):
                        run = pending.pop(0)
                        at_work[pool.submit(copy_context().run, self._run, run, jobs[run])] = run
                        continue
                    for future in wait(at_work, LOOK_SECONDS, FIRST_COMPLETED).done:
                        run = at_work.pop(future)
                        if not future.result():
                            failed.append(run)
            except BaseException:
                self.stopped.set()
                raise
        return failed

    def _begins(self, run: str) -> bool:
        with self._changed:
            if begins := bool(self._free) and not self._waiting:
                self._places[run] = self._free.pop(0)
            return begins

    def _run(self, run: str, job: Callable[[], bool]) -> bool:
        SHARING.set(self)
        try:
            return job()
        finally:
            with self._changed:
                self._leave(run)

    def _leave(self, run: str) -> None:
        self._waiting.pop(run, None)
        if (place := self._places.pop(run, None)) is not None:
            self._free.append(place)
            self._changed.notify_all()

    def crew_of(self, run: str) -> Crew:
        """Return the workers of a run, which has a place."""
        return self._places[run]

    def take(self, run: str, node: Node) -> bool:
        """Whether the run may make a node's stage now, and is the only one until `end`."""
        need = self._needs[run][node.name]
        with self._changed:
            is_free = need not in self._at_work
            self._at_work.add(need)
        return is_free

    def end(self, run: str, node: Node) -> None:
        """Let other runs read or make the stage."""
        with self._changed:
            self._at_work.discard(self._needs[run][node.name])
            self._changed.notify_all()

    def rest(self, run: str, nodes: Collection[Node], check: Callable[[], None]) -> None:
        """Lend the run's place to others until it may make one of these nodes and there is a place.

        check: called each second; its error ends the wait, without a place.
        """
        needs = {self._needs[run][node.name] for node in nodes}
        with self._changed:
            while True:
                self._leave(run)
                check()
                if free := needs - self._at_work:
                    self._waiting[run] = min(free)
                    if self._free and min(free) == min(self._waiting.values()):
                        del self._waiting[run]
                        self._places[run] = self._free.pop(0)
                        return
                self._changed.wait(LOOK_SECONDS)


SHARING: ContextVar[Sharing | None] = ContextVar("sharing", default=None)
"""Of the runs of this thread; None: a run has its own workers."""


def line_start(run: str | None) -> str:
    """Return the beginning of each line of a run: its name if lines of several runs alternate."""
    sharing = SHARING.get()
    return f"{run} | " if sharing is not None and sharing.lines_alternate else ""

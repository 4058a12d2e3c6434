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
from concurrent.futures import ThreadPoolExecutor, as_completed
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
        """Do the jobs of runs in threads, the longest first; return the runs whose job returns False.

        After an exception all runs end, and it is raised.
        """
        order = enumerate(sorted(jobs, key=lambda run: -len(self._needs[run])))
        with ThreadPoolExecutor(len(jobs) or 1, "run") as pool:
            # Runs that wait for a stage come first.
            runs = {pool.submit(copy_context().run, self._run, jobs[run], run, (1, n, run)): run for n, run in order}
            try:
                return [runs[future] for future in as_completed(runs) if not future.result()]
            except BaseException:
                self.stopped.set()
                raise

    def _run(self, job: Callable[[], bool], run: str, need: Need) -> bool:
        SHARING.set(self)
        try:
            self._wait(run, {need}, self._check)
            return job()
        finally:
            with self._changed:
                self._leave(run)

    def _check(self) -> None:
        if self.stopped.is_set():
            raise KeyboardInterrupt

    def _leave(self, run: str) -> None:
        self._waiting.pop(run, None)
        if (place := self._places.pop(run, None)) is not None:
            self._free.append(place)
            self._changed.notify_all()

    def _wait(self, run: str, needs: Collection[Need], check: Callable[[], None]) -> None:
        """Leave the run's place; wait until no other run makes one of these stages, and for a place."""
        with self._changed:
            while True:
                self._leave(run)
                check()
                if free := [need for need in needs if need not in self._at_work]:
                    self._waiting[run] = min(free)
                    if self._free and min(free) == min(self._waiting.values()):
                        del self._waiting[run]
                        self._places[run] = self._free.pop(0)
                        return
                self._changed.wait(LOOK_SECONDS)

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
        self._wait(run, [self._needs[run][node.name] for node in nodes], check)


SHARING: ContextVar[Sharing | None] = ContextVar("sharing", default=None)
"""Of the runs of this thread; None: a run has its own workers."""


def line_start(run: str | None) -> str:
    """Return the beginning of each line of a run: its name if lines of several runs alternate."""
    sharing = SHARING.get()
    return f"{run} | " if sharing is not None and sharing.lines_alternate else ""

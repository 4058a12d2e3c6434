"""Runs of a sweep share workers and stages: the nodes end when the test says so."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from rlhf.flows.graph.build import build
from rlhf.flows.graph.sweep import needs_of
from rlhf.flows.running.crew import crews_of
from rlhf.flows.running.runner import run_stages
from rlhf.flows.running.session import Session
from rlhf.flows.running.sharing import Sharing, line_start
from rlhf.stages.worker.client import StageFailed
from tests.flows.lines import Lines
from tests.flows.running.support import Told, recipe
from tests.support import until

SHORT = ("rl=null", "reward=null")
FAST, SLOW = "sft.optimizer.learning_rate=0.002", "sft.optimizer.learning_rate=0.001"


class Sweep:
    """Runs by name, each with the values of its variant."""

    def __init__(self, folder, workers: int, runs: dict[str, tuple[str, ...]]):
        self.recipes = {name: recipe(folder, *SHORT, *values) for name, values in runs.items()}
        self.told: dict[str, Told] = {}
        self.failed: list[str] = []
        self.starts: dict[str, str] = {}
        first = next(iter(self.recipes.values()))
        self._crews = crews_of(first, "sweep", workers)
        self.sharing = Sharing(self._crews.__enter__(), needs_of({n: build(r) for n, r in self.recipes.items()}))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with contextlib.suppress(KeyboardInterrupt, InterruptedError):
            self.failed = self.sharing.run_all({name: partial(self._one, name) for name in self.recipes})

    def _one(self, name: str) -> bool:
        self.starts[name] = line_start(name)
        session = Session(self.recipes[name], Lines(), name)
        self.told[name] = Told(session)
        try:
            run_stages(session, set(session.nodes), self.told[name].make)
        except StageFailed:
            return False
        finally:
            session.finish("failed")
        return True

    def now(self) -> dict[str, list[str]]:
        return {name: list(told.at_work) for name, told in list(self.told.items())}

    def until(self, **nodes: str) -> None:
        """Wait until each run is at one node, or at none."""
        wanted = {name: [node] if node else [] for name, node in nodes.items()}
        until(lambda: self.now() == wanted, 30)

    def ends_all(self, name: str) -> None:
        """End the nodes of a run until all runs have ended."""
        while self.thread.is_alive():
            for node in self.now()[name]:
                self.told[name].end(node)
            time.sleep(0.05)

    def end(self, name: str, error: BaseException | None = None) -> None:
        (node,) = self.told[name].at_work
        self.told[name].end(node, error)


@pytest.fixture
def sweep(tmp_path) -> Iterator[Callable[..., Sweep]]:
    found: list[Sweep] = []

    def start(workers: int, **runs: tuple[str, ...]) -> Sweep:
        found.append(Sweep(tmp_path, workers, runs))
        return found[-1]

    yield start
    for one in found:
        one.sharing.stopped.set()
        one.thread.join(30)
        assert not one.thread.is_alive()


def test_one_run_makes_a_shared_stage_and_the_others_what_is_their_own(sweep):
    found = sweep(2, one=(SLOW,), two=(FAST,))
    until(lambda: sorted(found.now().values()) == [[], ["base"]], 30)
    first, second = sorted(found.told, key=lambda name: not found.told[name].at_work)
    assert found.starts == {"one": "one | ", "two": "two | "}
    found.end(first)
    # The second reads what the first has made.
    found.until(**{first: "prepare", second: "base"})
    found.end(second)
    found.until(**{first: "prepare", second: ""})
    found.end(first)
    found.until(**{first: "sft", second: "prepare"})
    found.end(second)
    found.until(one="sft", two="sft")
    for name in (first, second):
        found.end(name)
    # Both need it, and the second goes on with its own.
    until(lambda: {"evaluate.base", "evaluate.sft"} <= {node for at in found.now().values() for node in at}, 30)


def test_a_run_whose_stages_others_make_lends_its_worker_to_the_next_run(sweep):
    found = sweep(2, one=(SLOW,), same=(SLOW, "export.name=b"), other=(FAST,))
    until(lambda: len(found.now()) == 3 and sorted(found.now().values()) == [[], [], ["base"]], 30)
    end = time.monotonic() + 60
    # Of the two that share it, one trains.
    while sorted(found.now().values()) != [[], ["sft"], ["sft"]]:
        assert time.monotonic() < end, found.now()
        for name in [name for name, nodes in found.now().items() if nodes and nodes != ["sft"]]:
            found.end(name)
        time.sleep(0.05)
    assert found.now()["other"] == ["sft"]


def test_with_one_worker_the_runs_go_one_after_another_and_the_longest_is_first(sweep):
    found = sweep(1, short=(SLOW, "export=null"), long=(SLOW,))
    for node in ("base", "prepare", "sft", "evaluate.base", "evaluate.sft", "export"):
        found.until(long=node)
        found.end("long")
    found.until(long="", short="base")
    assert found.starts == {"long": "", "short": ""}


def test_a_run_that_fails_stops_no_other_and_another_makes_the_stage(sweep):
    found = sweep(2, one=(SLOW,), two=(FAST,))
    until(lambda: sorted(found.now().values()) == [[], ["base"]], 30)
    first, second = sorted(found.told, key=lambda name: not found.told[name].at_work)
    found.end(first, StageFailed("base: no"))
    found.until(**{first: "", second: "base"})
    found.ends_all(second)
    assert found.told[second].order[-1] == "export"
    assert found.failed == [first]


def test_what_ends_one_run_ends_all(sweep):
    found = sweep(2, one=(SLOW,), two=(FAST,))
    until(lambda: sorted(found.now().values()) == [[], ["base"]], 30)
    first = next(name for name, nodes in found.now().items() if nodes)
    # As Ctrl-C.
    found.end(first, KeyboardInterrupt())
    found.thread.join(30)
    assert not found.thread.is_alive() and not any(found.now().values())

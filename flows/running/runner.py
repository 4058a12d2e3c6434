"""Runs a recipe's graph: a stage begins as soon as its inputs are made and its worker is free."""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import queue
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial

from rlhf.flows.graph.build import Node
from rlhf.flows.graph.policy_refs import Standing
from rlhf.flows.recipe.model import Recipe
from rlhf.flows.report.console import ConsoleReporter
from rlhf.flows.running.closing import close, status_after, status_at_end, summary
from rlhf.flows.running.gating import Agenda, stages_of
from rlhf.flows.running.session import Session

Make = Callable[[str], object]
"""Makes the node of a name, and raises its error."""


def run_plain(
    recipe: Recipe,
    *,
    name: str | None = None,
    force: set[str] | None = None,
    only: set[str] | None = None,
    standing: Standing | None = None,
) -> str:
    """Run the recipe in this process and its workers, without Prefect; return the run's status.

    name: of the run; generated if None. force: nodes to recompute although they are cached.
    only: nodes to run, with the inputs of each; None runs all.
    standing: the policies of names; None: as the registry has them now.
    """
    reporter = ConsoleReporter()
    session = Session(recipe, reporter, name, force, standing)
    try:
        reporter.console.print(f"run {session.name}  store {session.store.shown}")
        run_stages(session, only, partial(session.run_node, retries=recipe.retries))
    except BaseException as e:
        close(session, status_after(e), e)
        raise
    status = status_at_end(session)
    summary(session, reporter, close(session, status))
    return status


def run_stages(session: Session, chosen: Collection[str] | None, make: Make) -> None:
    """Make the nodes (`rlhf.flows.running.gating.stages_of`) one after another, or concurrently on several workers.

    After an error no further stage begins, the running ones may finish, and the first error is raised. An exception in
    this thread, such as Ctrl-C, ends running stages within seconds.
    """
    session.chosen = chosen
    if session.recipe.workers is None:
        for node in stages_of(session, chosen):
            make(node.name)
        return
    began, over, results = list[None](), list[None](), list[BaseException | None]()
    changed = queue.SimpleQueue[None]()

    def coordinate() -> None:
        began.append(None)
        error: BaseException | None = None
        try:
            if not over:
                agenda = Agenda(session, chosen)
                _run_overlapped(session, agenda, make)
                agenda.promote()
        except BaseException as e:
            error = e
        results.append(error)
        changed.put(None)

    def wait_for_result() -> None:
        while not results:
            with contextlib.suppress(queue.Empty):
                changed.get(timeout=1.0)

    # Python raises signals in the main thread only. `threading` and `concurrent.futures` hold locks in Python code, and
    # an exception there would leave them locked: a second thread uses them, and this one only waits.
    try:
        _thread.start_new_thread(contextvars.copy_context().run, (coordinate,))
        wait_for_result()
    except BaseException:
        # A thread that has not begun yet sees the mark, and begins no stage.
        over.append(None)
        session.stop()
        if began:
            wait_for_result()
        raise
    if (error := results[0]) is not None:
        raise error


def _run_overlapped(session: Session, agenda: Agenda, make: Make) -> None:
    at_work: dict[str, tuple[Node, Future[object]]] = {}
    """The stage of each busy worker, by the worker's name."""
    first: Exception | None = None
    with ThreadPoolExecutor(len(session.crew.names), "stage") as pool:
        try:
            while True:
                for node in agenda.ready() if first is None else ():
                    if (worker := session.crew.of(node)) not in at_work:
                        at_work[worker] = node, pool.submit(contextvars.copy_context().run, make, node.name)
                if not at_work:
                    break
                done, _ = wait([future for _, future in at_work.values()], return_when=FIRST_COMPLETED)
                for worker in [name for name, (_, future) in at_work.items() if future in done]:
                    node, future = at_work.pop(worker)
                    try:
                        future.result()
                        agenda.made(node)
                    except Exception as e:
                        if first is not None:
                            session.line(str(e))
                        elif at_work:
                            others = " and ".join(other.name for other, _ in at_work.values())
                            session.line(f"{e}\n  no further stage begins; running stages may finish: {others}")
                        first = first or e
        except BaseException:
            session.stop()
            raise
    if first is not None:
        raise first

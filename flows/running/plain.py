"""Runs a recipe in this process and a worker, without Prefect."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rlhf.flows.graph.build import Node
from rlhf.flows.graph.policy_refs import Standing
from rlhf.flows.recipe.model import Recipe
from rlhf.flows.report.console import ConsoleReporter
from rlhf.flows.running.closing import close, status_after, status_at_end, summary
from rlhf.flows.running.gating import stages_of
from rlhf.flows.running.overlap import run_overlapped
from rlhf.flows.running.session import Session


def run_plain(
    recipe: Recipe,
    *,
    name: str | None = None,
    force: set[str] | None = None,
    only: set[str] | None = None,
    standing: Standing | None = None,
) -> str:
    """Runs the recipe's nodes in order, or beside each other where it has several workers.

    name: of the run; chosen where None. force: nodes to make again although they are cached.
    only: nodes to run, which must hold the inputs of each; None runs all.
    standing: what the names of policies stand for; None: what they do now.
    Returns the run's status.
    """
    reporter = ConsoleReporter()
    session = Session(recipe, reporter, name, force, standing)
    try:
        reporter.console.print(f"run {session.name}  store {session.store.shown}")
        if recipe.workers is None:
            for node in stages_of(session, only):
                session.run_with_retries(node.name)
        else:
            _run_overlapped(session, only)
    except BaseException as e:
        close(session, status_after(e), e)
        raise
    status = status_at_end(session)
    summary(session, reporter, close(session, status))
    return status


def _run_overlapped(session: Session, only: set[str] | None) -> None:
    with ThreadPoolExecutor(len(session.crew.names), "stage") as pool:

        def begin(node: Node, ended: Callable[[], None]) -> Callable[[], None]:
            try:
                future = pool.submit(session.run_with_retries, node.name)
            except RuntimeError:
                # No thread is to be had, but the work is queued already, and another stage's thread would take it up.
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            future.add_done_callback(lambda _: ended())

            def result() -> None:
                future.result()

            return result

        run_overlapped(session, only, begin)

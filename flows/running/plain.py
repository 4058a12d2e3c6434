"""Runs a recipe in this process and a worker, without Prefect."""

from __future__ import annotations

from flows.graph.standing import Standing
from flows.recipe.model import Recipe
from flows.report.console import ConsoleReporter
from flows.running.closing import close, status_after, status_at_end, summary
from flows.running.gating import stages_of
from flows.running.session import Session


def run_plain(
    recipe: Recipe,
    *,
    name: str | None = None,
    force: set[str] | None = None,
    only: set[str] | None = None,
    standing: Standing | None = None,
) -> str:
    """Runs the recipe's nodes in order.

    name: of the run; chosen where None. force: nodes to make again although they are cached.
    only: nodes to run, which must hold the inputs of each; None runs all.
    standing: what the names of policies stand for; None: what they do now.
    Returns the run's status.
    """
    reporter = ConsoleReporter()
    session = Session(recipe, reporter, name, force, standing)
    reporter.console.print(f"run {session.name}  store {session.store.shown}")
    try:
        for node in stages_of(session, only):
            session.run_with_retries(node.name)
    except BaseException as e:
        close(session, status_after(e))
        raise
    status = status_at_end(session)
    summary(session, reporter, close(session, status))
    return status

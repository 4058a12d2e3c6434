"""Runs a recipe in this process and a worker, without Prefect."""

from __future__ import annotations

from flows.recipe.model import Recipe
from flows.report.console import ConsoleReporter
from flows.running.closing import close, status_after, status_at_end, summary
from flows.running.session import Session


def run_plain(
    recipe: Recipe, *, name: str | None = None, force: set[str] | None = None, only: set[str] | None = None
) -> Session:
    """Runs the recipe's nodes in order.

    name: of the run; chosen where None. force: nodes to make again although they are cached.
    only: nodes to run, which must hold the inputs of each; None runs all.
    """
    reporter = ConsoleReporter()
    session = Session(recipe, reporter, name, force)
    reporter.console.print(f"run {session.name}  store {session.store.shown}")
    try:
        for node in session.nodes:
            if only is None or node in only:
                session.run_with_retries(node)
    except BaseException as e:
        close(session, status_after(e))
        raise
    summary(session, reporter, close(session, status_at_end(session)))
    return session

"""Runs a recipe in this process and its workers, without Prefect."""

from __future__ import annotations

from functools import partial

from rlhf.flows.graph.policy_refs import Standing
from rlhf.flows.recipe.model import Recipe
from rlhf.flows.report.console import ConsoleReporter
from rlhf.flows.running.closing import close, status_after, status_at_end, summary
from rlhf.flows.running.overlap import run_stages
from rlhf.flows.running.session import Session


def run_plain(
    recipe: Recipe,
    *,
    name: str | None = None,
    force: set[str] | None = None,
    only: set[str] | None = None,
    standing: Standing | None = None,
) -> str:
    """Run the recipe's nodes and return the run's status.

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

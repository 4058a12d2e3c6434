"""Runs a recipe, with Prefect or without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flows.console import ConsoleReporter, closing_table
from flows.recipe import Recipe
from flows.report import write_report
from flows.session import Reporter, Session


def evaluations_of(session: Session) -> dict[str, dict[str, Any]]:
    """Metrics of the evaluated policies by label (base, sft, rl)."""
    made = session.made
    return {n.removeprefix("evaluate."): a.metrics for n, a in made.items() if n.startswith("evaluate.")}


def close(session: Session, status: str) -> str | None:
    """Ends a session and writes its report; returns the report's place."""
    session.finish(status)
    return write_report(session.store, session.name) if session.made else None


def run_plain(recipe: Recipe, *, name: str | None = None, force: set[str] | None = None, only: set[str] | None = None) -> Session:
    """Runs all nodes in this process and a worker, without Prefect."""
    reporter = ConsoleReporter()
    session = Session(recipe, reporter, name, force)
    reporter.console.print(f"run {session.name}  store {recipe.store}")
    try:
        for node in session.nodes:
            if only is None or node in only:
                session.run_with_retries(node)
    except BaseException:
        close(session, "failed")
        raise
    summary(session, reporter, close(session, "finished"))
    return session


def summary(session: Session, reporter: ConsoleReporter, report: str | None) -> None:
    """The closing table and where things lie."""
    found = evaluations_of(session)
    if found:
        reporter.console.print(closing_table(found))
    if "export" in session.made:
        reporter.console.print(f"model   {session.made['export'].url}")
    if report:
        reporter.console.print(f"report  {report}", soft_wrap=True)


def run_with_prefect(recipe: Recipe, *, name: str | None = None, force: set[str] | None = None, only: set[str] | None = None) -> None:
    """Runs the flow here; without PREFECT_API_URL Prefect starts a private server that ends with the run."""
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED", "false")
    from flows.pipeline import run_recipe

    run_recipe(recipe, name=name, force=force, only=only, reporter=ConsoleReporter())


def local_path(url: str) -> Path:
    """A store path as a local one."""
    return Path(url)


__all__ = ["Reporter", "close", "evaluations_of", "run_plain", "run_with_prefect", "summary"]

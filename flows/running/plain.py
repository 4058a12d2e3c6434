"""Runs a recipe, with Prefect or without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flows.recipe.model import Recipe
from flows.report.console import ConsoleReporter, closing_table
from flows.report.page import write_report
from flows.running.session import Reporter, Session

# Prefect's own words stay out of the terminal; they are in its log of the run.
QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
}


def evaluations_of(session: Session) -> dict[str, dict[str, Any]]:
    """Metrics of the evaluated policies by label (base, sft, rl)."""
    made = session.made
    return {n.removeprefix("evaluate."): a.metrics for n, a in made.items() if n.startswith("evaluate.")}


def close(session: Session, status: str) -> str | None:
    """Ends a session and writes its report; returns the report's place."""
    session.finish(status)
    if not session.made:
        return None
    try:
        return write_report(session.store, session.name)
    except Exception as e:
        # The work is done and kept; a page about it must not turn a finished run into a failed one.
        session.reporter.line(f"the report could not be written ({type(e).__name__}: {e}); `rlhf report` tries again")
        return None


def run_plain(
    recipe: Recipe, *, name: str | None = None, force: set[str] | None = None, only: set[str] | None = None
) -> Session:
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


def run_with_prefect(
    recipe: Recipe, *, name: str | None = None, force: set[str] | None = None, only: set[str] | None = None
) -> None:
    """Runs the flow here, beside the server that Prefect is set to or else a private one that ends with the run."""
    for setting, value in QUIET.items():
        os.environ.setdefault(setting, value)
    from flows.orchestration.server import PrivateServer, ServerFailed, may_be_set

    # A server takes longest to come up: it starts first, and Prefect is asked only where it may know one.
    server = None if may_be_set() else PrivateServer()
    try:
        from prefect.context import refresh_global_settings_context
        from prefect.settings import get_current_settings

        private = get_current_settings().api.url is None
        if private:
            server = server or PrivateServer()
            os.environ["PREFECT_API_URL"] = server.url
            refresh_global_settings_context()
        from flows.pipeline import run_recipe

        if private and server:
            server.wait()
        run_recipe(recipe, name=name, force=force, only=only)
    except ServerFailed as e:
        raise SystemExit(f"failed: {e}") from None
    finally:
        if server:
            os.environ.pop("PREFECT_API_URL", None)
            server.stop()


def local_path(url: str) -> Path:
    """A store path as a local one."""
    return Path(url)


__all__ = ["Reporter", "close", "evaluations_of", "run_plain", "run_with_prefect", "summary"]

"""The end of a run: closes its record, writes its report, and prints its evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf.flows.records import NOTHING_NEW, PARTIAL, REFUSED, WHOLE
from rlhf.flows.report.console import ConsoleReporter, closing_table, difference_lines
from rlhf.flows.report.decisions import decision_lines
from rlhf.flows.report.page import write_report
from rlhf.flows.report.reference_levels import level_notes
from rlhf.flows.running.session import Session
from rlhf.stages.store import audit_log
from rlhf.stages.store.artifacts import Artifact, ArtifactError
from rlhf.stages.store.keys import without_userinfo

if TYPE_CHECKING:
    from rich.table import Table

    from rlhf.stages.common.verdicts import Difference


def evaluations_of(session: Session) -> dict[str, dict[str, Any]]:
    """Return the metrics of the evaluated policies by label (base, sft, rl)."""
    return {label: artifact.metrics for label, artifact in _evaluated(session).items()}


def _evaluated(session: Session) -> dict[str, Artifact]:
    return {n.removeprefix("evaluate."): a for n, a in session.made.items() if n.startswith("evaluate.")}


def status_after(error: BaseException) -> str:
    """Return the status of a run that an error ended: `failed`, or `interrupted` by Ctrl-C, a signal or a cancellation.

    Prefect's exception for SIGTERM is not an Exception, as KeyboardInterrupt is not.
    """
    return "failed" if isinstance(error, Exception) else "interrupted"


def status_at_end(session: Session) -> str:
    """Return `finished`, the decision of the gate that ended the run, or `partial` for a part of a recipe."""
    decided = session.record.get("decision", {}).get("decision")
    if decided in (REFUSED, NOTHING_NEW):
        return str(decided)
    return "finished" if session.made.keys() == session.nodes.keys() else PARTIAL


def _differences(session: Session) -> dict[str, dict[str, Difference]]:
    """Return paired differences of the evaluated policies; empty if a table cannot be read."""
    # Imported here: tables load NumPy and Arrow, which commands that only read records do not need.
    from rlhf.stages.common.verdicts import differences

    try:
        return differences(_evaluated(session))
    except (ArtifactError, OSError, KeyError, ValueError) as e:
        # All artifacts are in the store by now: a table must not turn a finished run into a failed one.
        session.line(f"the policies could not be compared ({type(e).__name__}: {e})")
        return {}


def close(session: Session, status: str, error: BaseException | None = None) -> str | None:
    """End a session and write its report. Returns the report's path or URL; None if there is none.

    error: ended the run; the record has it if it did not end a stage.
    """
    nodes, recipe, store = session.record["nodes"].values(), session.recipe, session.store
    if isinstance(error, Exception) and not any("error" in e for e in nodes):
        session.record["error"] = without_userinfo(f"{type(error).__name__}: {error}")
    session.finish(status)
    session.reporter.run_ended()
    states = [entry["state"] for entry in nodes]
    entry: dict[str, Any] = {"made": states.count("made"), "cached": states.count("hit")} | session.command
    entry |= {"run": session.name, "recipe": recipe.name, "outcome": status, "forced": sorted(session.force) or None}
    if failed := audit_log.append(store, "run", **entry):
        session.line(f"the trail has no entry of this run: {failed}")
    if not session.made:
        return None
    # All artifacts are in the store by now: an error below must not turn a finished run into a failed one.
    try:
        if status in WHOLE:
            _collect(session)
    except Exception as e:
        session.line(f"the garbage collection ended early ({type(e).__name__}: {e}); `rlhf gc` tries again")
    try:
        return write_report(store, session.name)
    except Exception as e:
        session.line(f"the report could not be written ({type(e).__name__}: {e}); `rlhf report` tries again")
        return None


def _collect(session: Session) -> None:
    """Free the artifacts of older runs of the recipe, if its section `retention` says how many runs to keep."""
    retention = session.recipe.retention
    if retention is None:
        return
    # Imported here because most recipes collect nothing.
    from rlhf.flows.retention import roots_of
    from rlhf.stages.store.collect import Limits, collect

    # The run that has just finished is the newest of them.
    kept = retention.model_copy(update={"keep": max(1, retention.keep)})
    done = collect(session.store, lambda: roots_of(session.store, kept, session.recipe.name), Limits())
    if done.runs or done.garbage or done.freed:
        session.line(f"collected {len(done.runs)} runs and {len(done.garbage)} artifacts, {done.freed:,} bytes")


def findings(session: Session) -> list[Table | str]:
    """Return the evaluations with their differences, and the gate's decision, for people."""
    found: list[Table | str] = []
    if evaluations := evaluations_of(session):
        compared = difference_lines(_differences(session))
        found = [closing_table(evaluations), *compared, *level_notes(evaluations)]
    return [*found, *decision_lines(session.record)]


def summary(session: Session, reporter: ConsoleReporter, report: str | None, found: Sequence[Table | str]) -> None:
    """Print the findings, and the places of the exported model and the report."""
    for part in found:
        reporter.console.print(part, soft_wrap=isinstance(part, str))
    if status_at_end(session) == PARTIAL:
        left = f"{len(session.made)} of {len(session.nodes)} stages"
        reporter.console.print(f"partial: {left}; `rlhf run` of the whole recipe makes the others")
    if "export" in session.made:
        reporter.console.print(f"model   {session.made['export'].url}")
    if report:
        reporter.console.print(f"report  {report}", soft_wrap=True)

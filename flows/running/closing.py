"""The end of a run: its record closed, its report written, its evaluations shown."""

from __future__ import annotations

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
    from rlhf.stages.common.verdicts import Difference


def evaluations_of(session: Session) -> dict[str, dict[str, Any]]:
    """Metrics of the evaluated policies by label (base, sft, rl)."""
    return {label: artifact.metrics for label, artifact in _evaluated(session).items()}


def _evaluated(session: Session) -> dict[str, Artifact]:
    return {n.removeprefix("evaluate."): a for n, a in session.made.items() if n.startswith("evaluate.")}


def status_after(error: BaseException) -> str:
    """The status of a run that this error has ended: `failed`, or `interrupted` by Ctrl-C, a signal or a cancellation.

    Prefect's exception for SIGTERM is not an Exception, as KeyboardInterrupt is not.
    """
    return "failed" if isinstance(error, Exception) else "interrupted"


def status_at_end(session: Session) -> str:
    """`finished`, what the gate has ended it with, or `partial` where a run was told to do a part of its recipe."""
    decided = session.record.get("decision", {}).get("decision")
    if decided in (REFUSED, NOTHING_NEW):
        return str(decided)
    return "finished" if session.made.keys() == session.nodes.keys() else PARTIAL


def _differences(session: Session) -> dict[str, dict[str, Difference]]:
    """Paired differences of the evaluated policies; none where a table cannot be read."""
    # Here and not above: tables load NumPy and Arrow, which the commands that only look do without.
    from rlhf.stages.common.verdicts import differences

    try:
        return differences(_evaluated(session))
    except (ArtifactError, OSError, KeyError, ValueError) as e:
        # All artifacts are in the store by now: a table about them must not turn a finished run into a failed one.
        session.reporter.line(f"the policies could not be compared ({type(e).__name__}: {e})")
        return {}


def close(session: Session, status: str, error: BaseException | None = None) -> str | None:
    """Ends a session and writes its report. Returns the report's path or URL; None where there is none.

    error: ended the run; the record has it where it is of no stage.
    """
    if isinstance(error, Exception) and not any("error" in e for e in session.record["nodes"].values()):
        session.record["error"] = without_userinfo(f"{type(error).__name__}: {error}")
    session.finish(status)
    session.reporter.run_ended()
    _note(session, status)
    if not session.made:
        return None
    if status in WHOLE:
        _collect(session)
    try:
        return write_report(session.store, session.name)
    except Exception as e:
        # All artifacts are in the store by now: a page about them must not turn a finished run into a failed one.
        session.reporter.line(f"the report could not be written ({type(e).__name__}: {e}); `rlhf report` tries again")
        return None


def _note(session: Session, status: str) -> None:
    """Adds the run to the store's trail."""
    states = [entry["state"] for entry in session.record["nodes"].values()]
    more: dict[str, Any] = {"made": states.count("made"), "cached": states.count("hit")} | session.command
    forced = sorted(session.force) or None
    recipe = session.recipe.name
    entry = more | {"run": session.name, "recipe": recipe, "outcome": status, "forced": forced}
    failed = audit_log.append(session.store, "run", **entry)
    if failed:
        session.reporter.line(f"the trail has no entry of this run: {failed}")


def _collect(session: Session) -> None:
    """Frees what the older runs of the recipe have left, where it says how many of them stay."""
    recipe, store = session.recipe, session.store
    retention = recipe.retention
    if retention is None:
        return
    # The run that has just finished is the newest of them.
    kept = retention.model_copy(update={"keep": max(1, retention.keep)})
    # Here and not above: most recipes collect nothing.
    from rlhf.flows.retention import roots_of
    from rlhf.stages.store.collect import Limits, collect

    try:
        done = collect(store, lambda: roots_of(store, kept, recipe.name), Limits())
    except Exception as e:
        # All artifacts are in the store by now: what could not be freed must not turn a finished run into a failed one.
        session.reporter.line(f"nothing more was collected ({type(e).__name__}: {e}); `rlhf gc` tries again")
        return
    if done.runs or done.garbage or done.freed:
        session.reporter.line(
            f"collected {len(done.runs)} runs and {len(done.garbage)} artifacts, {done.freed:,} bytes"
        )


def summary(session: Session, reporter: ConsoleReporter, report: str | None) -> None:
    """Prints the evaluations, and where the exported model and the report are."""
    evaluations = evaluations_of(session)
    if evaluations:
        reporter.console.print(closing_table(evaluations))
        compared = difference_lines(_differences(session))
        for line in [*compared, *level_notes(evaluations)]:
            reporter.console.print(line, soft_wrap=True)
    for line in decision_lines(session.record):
        reporter.console.print(line, soft_wrap=True)
    if status_at_end(session) == PARTIAL:
        left = f"{len(session.made)} of {len(session.nodes)} stages"
        reporter.console.print(f"partial: {left}; `rlhf run` of the whole recipe makes the others")
    if "export" in session.made:
        reporter.console.print(f"model   {session.made['export'].url}")
    if report:
        reporter.console.print(f"report  {report}", soft_wrap=True)

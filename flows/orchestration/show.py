"""A run in Prefect's UI: log lines, progress, tables, samples, curves and links.

The store and the run's record hold the same content, so an error in this module never fails a run.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

from prefect import get_run_logger, runtime
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas import StateType, filters
from prefect.context import FlowRunContext, TaskRunContext
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from rich.console import Console

from flows.graph.build import Node
from flows.report.charts import curves_png_data
from flows.report.console import ConsoleReporter, log_width
from flows.report.decisions import decision_rows, outcome
from flows.running.closing import evaluations_of
from flows.running.session import Session
from stages.contract.registry import stage as find_stage
from stages.store.artifacts import Artifact
from stages.worker.protocol import Progress

PROGRESS_SECONDS = 5.0
"""Least time between two updates of a progress artifact: each is a request to the server."""
RECORD_SECONDS = 5.0
"""Longest wait for the server to store task runs and logs."""
# Completions shown of a stage, and characters of a cell.
SAMPLES = 12
SAMPLE_COLUMNS = ("prompt", "text", "stop")
PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")
"""What a backslash makes plain text in Markdown."""
CELL_CHARACTERS = 120


class LoggedConsole(Console):
    """A console whose lines are in the flow run's log too; with `silent` they are only there."""

    def __init__(self, silent: bool):
        super().__init__(highlight=False, markup=False, width=log_width() or (160 if silent else None))
        self._silent = silent

    def print(self, *objects: Any, **options: Any) -> None:
        if not self._silent:
            super().print(*objects, **options)
        if FlowRunContext.get() is None and TaskRunContext.get() is None:
            return
        text = io.StringIO()
        Console(file=text, highlight=False, markup=False, width=160).print(*objects, **options)
        if line := text.getvalue().rstrip():
            get_run_logger().info(line)


class PrefectReporter(ConsoleReporter):
    """The console's lines, and a progress artifact on the task run."""

    def __init__(self, silent: bool):
        super().__init__(LoggedConsole(silent))
        self._artifact: UUID | None = None
        self._sent = 0.0

    def stage_started(self, node: Node) -> None:
        super().stage_started(node)
        self._artifact, self._sent = None, time.monotonic()

    def progress(self, node: Node, event: Progress) -> None:
        super().progress(node, event)
        if time.monotonic() - self._sent >= PROGRESS_SECONDS:
            self._sent = time.monotonic()
            self._percent(node, 100.0 * event.done / max(1, event.total))

    def stage_ended(self, node: Node, state: str, manifest: dict[str, Any], seconds: float) -> None:
        super().stage_ended(node, state, manifest, seconds)
        if self._artifact is not None:
            self._percent(node, 100.0)

    def _percent(self, node: Node, percent: float) -> None:
        """Creates the task run's progress artifact, or updates it."""
        with errors_logged():
            if self._artifact is None:
                created: Any = create_progress_artifact(progress=percent, key=artifact_key(node.name, "progress"))
                self._artifact = created
            else:
                update_progress_artifact(self._artifact, progress=percent)


@contextlib.contextmanager
def errors_logged() -> Iterator[None]:
    """Logs and swallows errors of display code, so that they cannot fail a run."""
    try:
        yield
    except Exception as e:
        get_run_logger().warning("not shown in Prefect: %s: %s", type(e).__name__, e)


def rename_flow_run(name: str) -> None:
    """Calls the flow run that goes on as its run in the store: alerts and people take the one for the other."""
    with get_client(sync_client=True) as client:
        client.update_flow_run(runtime.flow_run.id, name=name)


def artifact_key(*names: str) -> str:
    """A key that Prefect accepts: [a-z0-9-]."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-")


def show_artifact(node: str, artifact: Artifact) -> None:
    """Attaches a table of metrics to the task run and, where the stage has them, a table of completions."""
    rows = [{"metric": k, "value": _cell(v)} for k, v in artifact.metrics.items()]
    place = f"{artifact.stage} {artifact.key[:12]}"
    create_table_artifact(table=rows, key=artifact_key(node, "metrics"), description=place)
    samples = find_stage(artifact.stage).samples
    if samples:
        # pyarrow, which reads tables, takes as long to import as a cached run; only a stage that ran pays for it.
        from stages.common.tables import first_rows

        lines = ["| prompt | completion | stop |", "|---|---|---|"]
        lines += [_sample_line(row) for row in first_rows(artifact, samples, SAMPLES, SAMPLE_COLUMNS)]
        create_markdown_artifact("\n".join(lines), key=artifact_key(node, "sample"), description=place)


def _sample_line(row: Mapping[str, Any]) -> str:
    # All punctuation: what a model writes must be no image, link or HTML of the page. A line break would end the cell.
    cells = [" ".join(str(row[column])[:CELL_CHARACTERS].splitlines()) for column in SAMPLE_COLUMNS]
    return f"| {' | '.join(re.sub(PUNCTUATION, _escaped, cell) for cell in cells)} |"


def _escaped(found: re.Match[str]) -> str:
    return f"\\{found[0]}"


def _cell(value: Any) -> int | float | str:
    """A value that a table artifact accepts: JSON has no infinities and its cells no structure."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float | str) else json.dumps(value)


def show_run(session: Session, report: str | None) -> None:
    """Attaches the evaluation table, the gate's decision, the curves and the link to the report to the flow run."""
    rows = [
        {"policy": k, "score": round(m["score"], 4), "low": round(m["score_low"], 4), "high": round(m["score_high"], 4)}
        for k, m in evaluations_of(session).items()
    ]
    if rows:
        create_table_artifact(table=rows, key="evaluation", description=f"held-out problems, run {session.name}")
    if decided := decision_rows(session.record):
        description = f"{outcome(session.record['decision'])}, run {session.name}"
        shown = [{name: _cell("" if value is None else value) for name, value in row.items()} for row in decided]
        create_table_artifact(table=shown, key="gate", description=description)
    if report:
        link = report if "://" in report else f"file://{report}"
        create_link_artifact(link=link, link_text=f"report of {session.name}", key="report")
    # Drawing costs a second, and a run that made nothing has the curves of an earlier one.
    image = curves_png_data(session.record) if session.worker.starts else None
    if image:
        create_markdown_artifact(f"![curves]({image})", key="curves", description=f"rounds of {session.name}")


def send_events() -> None:
    """Sends what Prefect's client still holds: it reports task runs and logs to the server in the background."""
    EventsWorker.drain_all(timeout=RECORD_SECONDS)
    APILogWorker.drain_all(timeout=RECORD_SECONDS)


def wait_until_recorded(flow_run: UUID) -> None:
    """Waits until the server has stored the end of every task run.

    The server stores task runs asynchronously; a private server that stopped earlier would lose the last ones. A
    server that is gone is told, and raises nothing: how the run has ended is for its state to say.
    """
    unfinished = filters.TaskRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING, StateType.SCHEDULED])
    of_flow = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[flow_run]))
    of_state = filters.TaskRunFilter(state=filters.TaskRunFilterState(type=unfinished))
    deadline = time.monotonic() + RECORD_SECONDS
    try:
        with get_client(sync_client=True) as client:
            while time.monotonic() < deadline:
                if not client.read_task_runs(flow_run_filter=of_flow, task_run_filter=of_state, limit=1):
                    break
                time.sleep(0.1)
    except Exception as e:
        # Outside of a flow: its logger is not there any more.
        logging.getLogger("rlhf").warning("Prefect may not have the end of this run (%s: %s)", type(e).__name__, e)

"""Show a run in Prefect's UI: log lines, progress, tables, samples, curves and links.

The store has the same content, so an error in this module never fails a run.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from prefect import get_run_logger, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import StateType, filters
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext, TaskRunContext
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.utilities.context import get_task_and_flow_run_ids

from rlhf.flows.graph.build import Node
from rlhf.flows.orchestration.display import Display, not_shown, short_client
from rlhf.flows.report.charts import curves_png_data
from rlhf.flows.report.console import ConsoleReporter
from rlhf.flows.report.decisions import decision_rows, outcome
from rlhf.flows.report.terminal import LastingConsole, PlainConsole, log_width
from rlhf.flows.running.closing import evaluations_of
from rlhf.flows.running.session import Session
from rlhf.stages.contract.registry import stage as find_stage
from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.worker.protocol import Progress

PROGRESS_SECONDS = 5.0
"""Least time between two updates of a progress artifact, each of which is a request."""
RECORD_SECONDS = 5.0
"""Longest wait for the server to store task runs and logs."""
# Completions shown of a stage, and characters of a cell.
SAMPLES = 12
SAMPLE_COLUMNS = ("prompt", "text", "stop")
PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")
"""Characters that a backslash makes plain text in Markdown."""
ESCAPED = r"\\\g<0>"
CELL_CHARACTERS = 120


class LoggedConsole(LastingConsole):
    """A console whose lines also go to the flow run's log; with `silent` only there."""

    def __init__(self, silent: bool):
        super().__init__(highlight=False, markup=False, width=log_width() or (160 if silent else None))
        self._silent = silent

    def print(self, *objects: Any, **options: Any) -> None:
        if not self._silent:
            super().print(*objects, **options)
        if FlowRunContext.get() is None and TaskRunContext.get() is None:
            return
        text = io.StringIO()
        PlainConsole(file=text, highlight=False, markup=False, width=160).print(*objects, **options)
        if line := text.getvalue().rstrip():
            get_run_logger().info(line)


class PrefectReporter(ConsoleReporter):
    """The console's lines, and a progress artifact on the task run."""

    def __init__(self, silent: bool):
        super().__init__(LoggedConsole(silent))
        self.recipe = "run"
        self.display = Display()
        self._progress: dict[str, ProgressBar] = {}
        """By running stage; only the thread of its stage uses a bar."""

    def stage_started(self, node: Node) -> None:
        super().stage_started(node)
        self._progress[node.name] = ProgressBar(artifact_key(self.recipe, node.name, "progress"))

    def progress(self, node: Node, event: Progress) -> None:
        super().progress(node, event)
        bar = self._progress[node.name]
        if time.monotonic() - bar.sent >= PROGRESS_SECONDS:
            bar.show(self.display, 100.0 * event.done / max(1, event.total))

    def stage_ended(self, node: Node, state: str, manifest: dict[str, Any], seconds: float) -> None:
        super().stage_ended(node, state, manifest, seconds)
        bar = self._progress.pop(node.name, None)
        if bar is not None and bar.begun:
            bar.show(self.display, 100.0)


class ProgressBar:
    """The progress artifact of a task run."""

    def __init__(self, key: str):
        self.begun, self.sent = False, time.monotonic()
        self._key = key
        # Only the display's thread uses it.
        self._artifact: UUID | None = None

    def show(self, display: Display, percent: float) -> None:
        """Create or update the artifact."""
        self.begun, self.sent = True, time.monotonic()
        display.put(self._key, lambda client: self._update(client, min(100.0, percent)))

    def _update(self, client: SyncPrefectClient, percent: float) -> None:
        if self._artifact is None:
            self._artifact = client.create_artifact(_artifact("progress", self._key, percent)).id
        else:
            client.update_artifact(artifact_id=self._artifact, artifact=ArtifactUpdate(data=percent))


def _artifact(kind: str, key: str, data: Any, description: str | None = None) -> ArtifactCreate:
    """Return an artifact of the task run or flow run of the caller."""
    task_run, flow_run = get_task_and_flow_run_ids()
    return ArtifactCreate(
        type=kind, key=key, data=data, description=description, task_run_id=task_run, flow_run_id=flow_run
    )


def _show_table(display: Display, key: str, rows: Sequence[Mapping[str, Any]], description: str) -> None:
    data = json.dumps([{name: _cell(value) for name, value in row.items()} for row in rows])
    _show(display, _artifact("table", key, data, description))


def _show_text(display: Display, key: str, markdown: str, description: str) -> None:
    _show(display, _artifact("markdown", key, markdown, description))


def _show(display: Display, artifact: ArtifactCreate) -> None:
    # Stages of several rounds have the same key.
    display.put(f"{artifact.key}: {artifact.description}", lambda client: client.create_artifact(artifact))


@contextlib.contextmanager
def errors_logged() -> Iterator[None]:
    """Log errors of display code instead of raising them."""
    try:
        yield
    except Exception as e:
        not_shown(e)


def label_flow_run(name: str | None, *tags: str) -> None:
    """Give the current flow run more tags, and the name of its run in the store unless that is None."""
    with get_client(sync_client=True) as client:
        present = client.read_flow_run(runtime.flow_run.id).tags
        client.update_flow_run(runtime.flow_run.id, name=name, tags=list(dict.fromkeys([*present, *tags])))


def artifact_key(recipe: str, node: str, kind: str) -> str:
    """Return a key that Prefect accepts: [a-z0-9-].

    The runs and rounds of a recipe share keys: the page of a key is their history.
    """
    text = "-".join([recipe, re.sub(r"^round-\d+\.", "", node), kind])
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def show_artifact(display: Display, session: Session, node: str, artifact: Artifact) -> None:
    """Attach a table of metrics to the task run and, if the stage has any, a table of completions."""
    rows = [{"metric": k, "value": v} for k, v in artifact.metrics.items()]
    place = f"{node} of run {session.name}: {artifact.stage} {artifact.key[:12]}"
    recipe = session.recipe.name
    _show_table(display, artifact_key(recipe, node, "metrics"), rows, place)
    samples = find_stage(artifact.stage).samples
    if samples:
        # The import of pyarrow takes as long as a cached run: only a stage that ran pays for it.
        from rlhf.stages.common.tables import first_rows

        lines = ["| prompt | completion | stop |", "|---|---|---|"]
        lines += [_sample_line(row) for row in first_rows(artifact, samples, SAMPLES, SAMPLE_COLUMNS)]
        _show_text(display, artifact_key(recipe, node, "sample"), "\n".join(lines), place)


def _sample_line(row: Mapping[str, Any]) -> str:
    # Escaped punctuation cannot become an image, link or HTML of the page. A line break would end the cell.
    cells = [" ".join(str(row[column])[:CELL_CHARACTERS].splitlines()) for column in SAMPLE_COLUMNS]
    return f"| {' | '.join(PUNCTUATION.sub(ESCAPED, cell) for cell in cells)} |"


def _cell(value: Any) -> int | float | str:
    """Return a value that a table artifact accepts: no infinity, no None, no structure."""
    if value is None:
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float | str) else json.dumps(value)


def show_command(display: Display, session: Session, command: str) -> None:
    """Attach the command that shows the run: alerts of a killed run link to this page."""
    _show_text(display, artifact_key(session.recipe.name, "", "run"), f"`{command}`", f"run {session.name}")


def show_run(display: Display, session: Session, report: str | None, found: Sequence[Any], command: str) -> None:
    """Attach the evaluation table, the gate's decision, the curves and the findings to the flow run.

    found: the lines that `rlhf run` prints at its end. command: prints them again.
    """
    recipe, of_run = session.recipe.name, f"run {session.name}"
    rows = [
        {"policy": k, "score": round(m["score"], 4), "low": round(m["score_low"], 4), "high": round(m["score_high"], 4)}
        for k, m in evaluations_of(session).items()
    ]
    if rows:
        _show_table(display, artifact_key(recipe, "", "evaluation"), rows, f"held-out problems, {of_run}")
    if checks := decision_rows(session.record):
        said = f"{outcome(session.record['decision'])}, {of_run}"
        _show_table(display, artifact_key(recipe, "", "gate"), checks, said)
    text = io.StringIO()
    PlainConsole(file=text, highlight=False, markup=False, width=120).print(*found, sep="\n")
    # A browser opens no file from a server's page.
    place = f"Report: `{report}`\n\n" if report else ""
    markdown = f"{place}Shown by `{command}`\n\n```text\n{text.getvalue().replace('```', '` ` `')}\n```"
    _show_text(display, artifact_key(recipe, "", "report"), markdown, of_run)
    # Drawing costs a second, and a cached run has the curves of an earlier one.
    image = curves_png_data(session.record) if session.worker_starts else None
    if image:
        _show_text(display, artifact_key(recipe, "", "curves"), f"![curves]({image})", f"rounds of {of_run}")


def wait_until_recorded(flow_run: UUID) -> None:
    """Wait until the server has stored the end of every task run; log an error.

    The server stores task runs asynchronously; a private server that stopped earlier would lose the last ones.
    """
    unfinished = filters.TaskRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING, StateType.SCHEDULED])
    of_flow = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[flow_run]))
    of_state = filters.TaskRunFilter(state=filters.TaskRunFilterState(type=unfinished))
    deadline = time.monotonic() + RECORD_SECONDS
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), short_client() as client:
            while time.monotonic() < deadline:
                if not client.read_task_runs(flow_run_filter=of_flow, task_run_filter=of_state, limit=1):
                    break
                time.sleep(0.1)
    except Exception as e:
        # The flow has ended, and its logger too.
        logging.getLogger("rlhf").warning("Prefect may not have the end of this run (%s: %s)", type(e).__name__, e)

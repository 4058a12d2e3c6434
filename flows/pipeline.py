"""The Prefect flow `rlhf-pipeline`: each stage a task; the store decides what is cached, Prefect shows it."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext
from prefect.states import Completed, State
from prefect.task_runners import ThreadPoolTaskRunner

from flows.console import ConsoleReporter, headline
from flows.graph import Node
from flows.overrides import Overrides
from flows.recipe import Recipe, load_recipe
from flows.run import close, evaluations_of, summary
from flows.session import Session
from stages.artifacts import Artifact
from stages.client import WorkerDied

PROGRESS_SECONDS = 5.0

# Tasks get names, not sessions: what Prefect stores of a task run stays small and readable.
_sessions: dict[str, Session] = {}


class PrefectReporter(ConsoleReporter):
    """The console's lines, and a progress artifact on the task run."""

    def __init__(self, log_lines: bool):
        super().__init__()
        self._log_lines = log_lines
        self._artifact: Any = None
        self._sent = 0.0

    def stage_started(self, node: Node) -> None:
        super().stage_started(node)
        self._artifact, self._sent = None, time.monotonic()

    def progress(self, node: Node, event: dict[str, Any]) -> None:
        super().progress(node, event)
        if time.monotonic() - self._sent < PROGRESS_SECONDS or TaskRunContext.get() is None:
            return
        self._sent = time.monotonic()
        percent = 100.0 * event["done"] / max(1, event["total"])
        if self._artifact is None:
            self._artifact = create_progress_artifact(progress=percent, key=artifact_key(node.name, "progress"))
        else:
            update_progress_artifact(self._artifact, progress=percent)

    def line(self, text: str) -> None:
        super().line(text)
        if self._log_lines:
            get_run_logger().info(text)


def artifact_key(*names: str) -> str:
    """A key that Prefect takes: [a-z0-9-]."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-")


@task(name="stage", task_run_name="{node}", cache_policy=NO_CACHE, persist_result=False, retry_delay_seconds=1)
def stage_task(run: str, node: str, stage: str) -> State[Any]:
    """Makes or finds one artifact; a hit ends in the state Cached."""
    session = _sessions[run]
    state, artifact = session.run_node(node)
    small = {"stage": artifact.stage, "key": artifact.key, "digest": artifact.digest}
    if state == "hit":
        return Completed(name="Cached", message=f"{artifact.stage}/{artifact.key[:12]}", data=small)
    show(node, artifact)
    return Completed(message=headline(artifact.stage, artifact.metrics) or "made", data=small)


def only_dead_workers(task: Any, task_run: Any, state: State[Any]) -> bool:
    """A dead worker is worth another try; a stage that raised would raise again."""
    try:
        state.result(raise_on_failure=True)
    except WorkerDied:
        return True
    except BaseException:
        return False
    return False


def show(node: str, artifact: Artifact) -> None:
    """What people look at in the UI: a table of metrics and, for texts, a sample."""
    rows = [{"metric": k, "value": v if isinstance(v, int | float | str) else json.dumps(v)} for k, v in artifact.metrics.items()]
    create_table_artifact(table=rows, key=artifact_key(node, "metrics"), description=f"{artifact.stage} {artifact.key[:12]}")
    if artifact.stage in ("rollout", "evaluate"):
        from stages.tables import read_rows

        lines = ["| prompt | completion | stop |", "|---|---|---|"]
        for row in read_rows(artifact, "rollouts/")[:12]:
            cells = [str(row[c]).replace("|", "\\|").replace("\n", " ")[:120] for c in ("prompt", "text", "stop")]
            lines.append(f"| {' | '.join(cells)} |")
        create_markdown_artifact("\n".join(lines), key=artifact_key(node, "sample"))


@flow(
    name="rlhf-pipeline",
    validate_parameters=True,
    persist_result=False,
    task_runner=ThreadPoolTaskRunner(max_workers=1),  # type: ignore[arg-type]
    description="Data preparation, SFT, reward model, rounds of RL, evaluation and export; cached and resumable.",
)
def rlhf_pipeline(
    recipe: str = "demo",
    run_name: str | None = None,
    force: list[str] | None = None,
    only: list[str] | None = None,
    overrides: Overrides = Overrides(),  # noqa: B008
) -> dict[str, Any]:
    """Runs a recipe.

    recipe: a built-in name or the path of a YAML file.
    run_name: name of the run; chosen where empty.
    force: nodes or stages that are made again although they are cached.
    only: nodes or stages to run; the others must be cached.
    overrides: fields of the recipe that this run sets differently; what is empty stays as the recipe says.
    """
    resolved = load_recipe(recipe, overrides.model_dump(mode="json", exclude_unset=True, exclude_none=True))
    return _run(resolved, run_name, force, only, PrefectReporter(log_lines=True))


def _run(
    recipe: Recipe, name: str | None, force: list[str] | None, only: list[str] | None, reporter: PrefectReporter
) -> dict[str, Any]:
    session = Session(recipe, reporter, name, None)
    session.force = select(session, force) if force else set()
    chosen = select(session, only) if only else set(session.nodes)
    _sessions[session.name] = session
    reporter.console.print(f"run {session.name}  store {recipe.store}")
    try:
        for node in session.nodes.values():
            if node.name in chosen:
                stage_task.with_options(retries=recipe.retries, retry_condition_fn=only_dead_workers)(
                    session.name, node.name, node.stage, return_state=True
                ).result(raise_on_failure=True)
            else:
                session.run_node(node.name)
    except BaseException:
        close(session, "failed")
        raise
    finally:
        _sessions.pop(session.name)
    report = close(session, "finished")
    publish(session, report)
    summary(session, reporter, report)
    return {"run": session.name, "evaluations": {k: v["score"] for k, v in evaluations_of(session).items()}}


def select(session: Session, names: list[str]) -> set[str]:
    """Nodes by name or by stage. Raises ValueError naming what there is."""
    found: set[str] = set()
    for name in names:
        mine = {n.name for n in session.nodes.values() if name in (n.name, n.stage)}
        if not mine:
            known = dict.fromkeys([n.stage for n in session.nodes.values()])
            raise ValueError(f"no stage or node {name!r} in this recipe; stages are {', '.join(known)}")
        found |= mine
    return found


def publish(session: Session, report: str | None) -> None:
    """The evaluation table, the curves and the link to the report, on the flow run."""
    from flows.plots import curves_png_data

    rows = [
        {"policy": k, "score": round(m["score"], 4), "low": round(m["score_low"], 4), "high": round(m["score_high"], 4)}
        for k, m in evaluations_of(session).items()
    ]
    if rows:
        create_table_artifact(table=rows, key="evaluation", description=f"held-out problems, run {session.name}")
    image = curves_png_data(session.record)
    if image:
        create_markdown_artifact(f"![curves]({image})", key="curves", description=f"rounds of {session.name}")
    if report:
        link = report if "://" in report else f"file://{report}"
        create_link_artifact(link=link, link_text=f"report of {session.name}", key="report")


def run_recipe(recipe: Recipe, *, name: str | None, force: set[str] | None, only: set[str] | None, reporter: Any) -> None:
    """Runs the flow in this process for the command line."""

    @flow(name="rlhf-pipeline", flow_run_name=name, persist_result=False, validate_parameters=False)
    def pipeline(recipe: dict[str, Any]) -> None:
        _run(Recipe.model_validate_json(json.dumps(recipe)), name, list(force or []), list(only or []), PrefectReporter(False))

    pipeline(recipe.model_dump(mode="json"))

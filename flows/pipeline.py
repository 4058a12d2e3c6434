"""The Prefect flow `rlhf-pipeline`: each stage a task; the store decides what is cached, Prefect shows it."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal
from uuid import UUID

from coolname import generate_slug
from prefect import flow, get_run_logger, runtime, task
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas import StateType, filters
from prefect.context import FlowRunContext, TaskRunContext
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.states import Completed, State
from rich.console import Console

from flows.graph.build import Node, select, with_inputs
from flows.recipe.model import Recipe
from flows.recipe.overrides import (
    RL,
    SFT,
    Base,
    Data,
    Distill,
    Evaluate,
    Export,
    Preference,
    Retries,
    Reward,
    Seed,
    StoreUrl,
    told,
)
from flows.recipe.reading import load_recipe
from flows.report.console import ConsoleReporter, headline, log_width
from flows.report.plots import curves_png_data
from flows.running.plain import close, evaluations_of, summary
from flows.running.session import Session
from stages.store.artifacts import Artifact
from stages.worker.client import WorkerDied
from stages.worker.protocol import Progress

NAME = "rlhf-pipeline"
PROGRESS_SECONDS = 5.0
RECORD_SECONDS = 5.0

# Tasks get names, not sessions: what Prefect stores of a task run stays small and readable.
_sessions: dict[str, Session] = {}
# The recipe of a flow that the command line runs: resolved already, --set included.
_resolved: ContextVar[Recipe | None] = ContextVar("resolved", default=None)


class LoggedConsole(Console):
    """A console whose lines also go to the run's log; `silent` where that log is printed anyway."""

    def __init__(self, silent: bool):
        super().__init__(highlight=False, width=log_width() or (160 if silent else None))
        self._silent = silent

    def print(self, *objects: Any, **options: Any) -> None:
        if not self._silent:
            super().print(*objects, **options)
        if FlowRunContext.get() is not None or TaskRunContext.get() is not None:
            plain = Console(file=io.StringIO(), highlight=False, width=160)
            plain.print(*objects, **options)
            text = plain.file.getvalue().rstrip()  # type: ignore[attr-defined]
            if text.strip():
                get_run_logger().info(text)


class PrefectReporter(ConsoleReporter):
    """The console's lines, and a progress artifact on the task run."""

    def __init__(self, silent: bool):
        super().__init__(LoggedConsole(silent))
        self._artifact: Any = None
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
        with only_for_show():
            if self._artifact is None:
                self._artifact = create_progress_artifact(progress=percent, key=artifact_key(node.name, "progress"))
            else:
                update_progress_artifact(self._artifact, progress=percent)


@contextlib.contextmanager
def only_for_show() -> Iterator[None]:
    """What only helps people to look at a run never ends one."""
    try:
        yield
    except Exception as e:
        get_run_logger().warning("not shown in Prefect: %s: %s", type(e).__name__, e)


def artifact_key(*names: str) -> str:
    """A key that Prefect takes: [a-z0-9-]."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-")


@task(name="stage", task_run_name="{node}", cache_policy=NO_CACHE, persist_result=False, retry_delay_seconds=1)
def stage_task(run: str, node: str, stage: str) -> State[Any]:
    """Makes or finds one artifact; a hit ends in the state Cached."""
    session = _sessions[run]
    tries = runtime.task_run.run_count
    if tries > 1:
        session.reporter.line(f"{node}: try {tries} of {session.recipe.retries + 1} with a fresh worker")
    try:
        state, artifact = session.run_node(node)
    except WorkerDied as e:
        session.reporter.line(f"{node}: {e}")
        raise
    small = {"stage": artifact.stage, "key": artifact.key, "digest": artifact.digest}
    if state == "hit":
        return Completed(name="Cached", message=f"{artifact.stage}/{artifact.key[:12]}", data=small)
    with only_for_show():
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
    rows = [{"metric": k, "value": cell(v)} for k, v in artifact.metrics.items()]
    place = f"{artifact.stage} {artifact.key[:12]}"
    create_table_artifact(table=rows, key=artifact_key(node, "metrics"), description=place)
    if artifact.stage in ("rollout", "evaluate"):
        from stages.common.tables import read_rows

        lines = ["| prompt | completion | stop |", "|---|---|---|"]
        for row in read_rows(artifact, "rollouts/")[:12]:
            cells = [str(row[c]).replace("|", "\\|").replace("\n", " ")[:120] for c in ("prompt", "text", "stop")]
            lines.append(f"| {' | '.join(cells)} |")
        create_markdown_artifact("\n".join(lines), key=artifact_key(node, "sample"), description=place)


def cell(value: Any) -> Any:
    """A value that a table artifact takes."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float | str) else json.dumps(value)


@flow(
    name=NAME,
    description="Data, SFT, distillation, preference, reward model, RL, evaluation, export; cached and resumable.",
    validate_parameters=True,
    persist_result=False,
)
def rlhf_pipeline(
    recipe: str = "demo",
    run_name: str | None = None,
    force: list[str] | None = None,
    only: list[str] | None = None,
    skip: list[Literal["sft", "distill", "preference", "reward", "rl", "evaluate", "export"]] | None = None,
    seed: Seed = None,
    store: StoreUrl = None,
    retries: Retries = None,
    base: Base = None,
    data: Data = None,
    sft: SFT = None,
    distill: Distill = None,
    preference: Preference = None,
    reward: Reward = None,
    rl: RL = None,
    evaluate: Evaluate = None,
    export: Export = None,
) -> dict[str, Any]:
    """Runs a recipe. The recipe's own fields may be given beside it; what is left out stays as the recipe says.

    Args:
        recipe: A built-in recipe's name or the path of a YAML file.
        run_name: Name of the run; chosen where empty.
        force: Stages or nodes (round-003.update) to make again although they are cached.
        only: Stages or nodes to run, with what they need before them; empty runs all.
        skip: Sections of the recipe to leave out.
        seed: Root of all randomness.
        store: Folder or fsspec URL of all artifacts and runs.
        retries: How often a stage is tried again when its worker dies.
        base: The model to start from.
        data: Data preparation.
        sft: Supervised fine-tuning.
        distill: Distillation from a teacher.
        preference: Preference optimisation: DPO and its relatives.
        reward: The reward model.
        rl: Rounds of rollouts, scores and policy updates.
        evaluate: Evaluation on held-out problems.
        export: The Hugging Face folder.
    """
    over = told(
        seed=seed,
        store=store,
        retries=retries,
        base=base,
        data=data,
        sft=sft,
        distill=distill,
        preference=preference,
        reward=reward,
        rl=rl,
        evaluate=evaluate,
        export=export,
    )
    given = _resolved.get()
    resolved = given or load_recipe(recipe, over | dict.fromkeys(skip or []))
    session = Session(resolved, PrefectReporter(silent=given is None), free_name(resolved, run_name), None)
    return _run(session, force or [], only or [])


def free_name(recipe: Recipe, wanted: str | None) -> str:
    """The run's name: the wanted one, else the flow run's; a flow run that is tried again numbers its runs."""
    shown = str(runtime.flow_run.name)
    name = wanted or (shown if shown.startswith(f"{recipe.name}-") else f"{recipe.name}-{shown}")
    tries = runtime.flow_run.run_count
    return name if tries <= 1 else f"{name}-{tries}"


def _run(session: Session, force: list[str], only: list[str]) -> dict[str, Any]:
    recipe, reporter = session.recipe, session.reporter
    assert isinstance(reporter, PrefectReporter)
    _sessions[session.name] = session
    reporter.console.print(f"run {session.name}  store {recipe.store}")
    try:
        session.force = select(session.nodes, force)
        chosen = with_inputs(session.nodes, select(session.nodes, only)) if only else set(session.nodes)
        for node in session.nodes.values():
            if node.name in chosen:
                stage_task.with_options(retries=recipe.retries, retry_condition_fn=only_dead_workers)(
                    session.name, node.name, node.stage, return_state=True
                ).result(raise_on_failure=True)
    except BaseException:
        close(session, "failed")
        raise
    finally:
        _sessions.pop(session.name)
    report = close(session, "finished")
    with only_for_show():
        publish(session, report)
    summary(session, reporter, report)
    return {"run": session.name, "evaluations": {k: v["score"] for k, v in evaluations_of(session).items()}}


def publish(session: Session, report: str | None) -> None:
    """The evaluation table, the curves and the link to the report, on the flow run."""
    rows = [
        {"policy": k, "score": round(m["score"], 4), "low": round(m["score_low"], 4), "high": round(m["score_high"], 4)}
        for k, m in evaluations_of(session).items()
    ]
    if rows:
        create_table_artifact(table=rows, key="evaluation", description=f"held-out problems, run {session.name}")
    if report:
        link = report if "://" in report else f"file://{report}"
        create_link_artifact(link=link, link_text=f"report of {session.name}", key="report")
    # Drawing costs a second: a run that made nothing has the curves of an earlier one.
    image = curves_png_data(session.record) if session.worker.starts else None
    if image:
        create_markdown_artifact(f"![curves]({image})", key="curves", description=f"rounds of {session.name}")


def run_recipe(recipe: Recipe, *, name: str | None, force: set[str] | None, only: set[str] | None) -> None:
    """Runs the flow in this process for the command line."""
    name = name or f"{recipe.name}-{generate_slug(2)}"
    shown = recipe.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude={"name", "description"})
    options = {"run_name": name, "force": sorted(force or []), "only": sorted(only or [])}
    local = rlhf_pipeline.with_options(flow_run_name=re.sub(r"[{}]", "", name), validate_parameters=False)
    token = _resolved.set(recipe)
    try:
        state: Any = local(recipe.name, **options, **shown, return_state=True)
    finally:
        _resolved.reset(token)
        send_events()
    wait_until_recorded(state.state_details.flow_run_id)
    state.result(raise_on_failure=True)


def send_events() -> None:
    """Prefect tells its server of task runs and logs in the background; here it has told all."""
    EventsWorker.drain_all(timeout=RECORD_SECONDS)
    APILogWorker.drain_all(timeout=RECORD_SECONDS)


def wait_until_recorded(flow_run: UUID) -> None:
    """The server writes task runs down behind their backs; one that stopped now would forget the last."""
    unfinished = filters.TaskRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING, StateType.SCHEDULED])
    mine = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[flow_run]))
    open_runs = filters.TaskRunFilter(state=filters.TaskRunFilterState(type=unfinished))
    deadline = time.monotonic() + RECORD_SECONDS
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            if not client.read_task_runs(flow_run_filter=mine, task_run_filter=open_runs, limit=1):
                break
            time.sleep(0.1)

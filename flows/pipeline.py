"""The Prefect flow `rlhf-pipeline`: each stage is a task. The store decides which are cached; Prefect shows them."""

from __future__ import annotations

import re
import shlex
import traceback
from contextvars import ContextVar
from typing import Any

from coolname import generate_slug
from httpx import TransportError
from prefect import flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.states import Cancelled, Completed, Failed, State

from rlhf.flows.graph.build import select, with_inputs
from rlhf.flows.graph.policy_refs import Standing
from rlhf.flows.orchestration.cancellation import Cancellation, give_up_soon, send_events
from rlhf.flows.orchestration.prefect_artifacts import (
    PrefectReporter,
    errors_logged,
    label_flow_run,
    show_artifact,
    show_command,
    show_run,
    wait_until_recorded,
)
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.overrides import recipe_parameters, values_of
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.records import DECIDED, REFUSED
from rlhf.flows.running.checks import check, try_algorithm
from rlhf.flows.running.closing import close, evaluations_of, findings, status_after, status_at_end, summary
from rlhf.flows.running.runner import run_stages
from rlhf.flows.running.session import RunTooLong, Session
from rlhf.flows.running.sharing import SHARING, line_start
from rlhf.stages.contract.registry import stage as find_stage
from rlhf.stages.gate.decide import PROMOTED
from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.keys import published, without_userinfo
from rlhf.stages.store.registry import RegistryError
from rlhf.stages.store.transfers import is_unreachable
from rlhf.stages.worker.client import StageFailed, WorkerDied

NAME = "rlhf-pipeline"
SHOWN_SECONDS = 10.0
"""Time at the end of a run for calls that show something in Prefect."""

# Prefect serialises the arguments of a task, and a session holds a process and open pipes. A task therefore gets the
# session's name and looks it up here; it runs in the process of its flow.
_sessions: dict[str, Session] = {}
# The arguments of a flow are serialised for the UI too. Under `rlhf run` the recipe, with its --set options, is
# resolved before the flow starts: the flow takes it from here, and its arguments only show it.
_resolved: ContextVar[tuple[Recipe, Standing | None] | None] = ContextVar("resolved", default=None)
# The errors that ended runs of this command: their states do not reach a server that is gone.
_errors: dict[str, BaseException] = {}
EXPECTED = (RecipeError, ArtifactError, RegistryError, StageFailed, WorkerDied, RunTooLong, OSError)
"""Errors with a message for the user: the flow's log has no traceback of them."""


@task(name="stage", task_run_name="{node}", cache_policy=NO_CACHE, persist_result=False, retry_delay_seconds=1)
def stage_task(run: str, node: str) -> State[Any]:
    """Make or read one artifact; a hit ends in the state Cached."""
    session = _sessions[run]
    attempt = runtime.task_run.run_count
    if attempt > 1:
        session.reporter.line(f"{node}: try {attempt} of {session.recipe.retries + 1} with a fresh worker")
    try:
        state, artifact = session.run_node(node)
    except (StageFailed, WorkerDied, ArtifactError) as e:
        if isinstance(e, WorkerDied):
            session.reporter.line(f"{node}: {e}")
        # Prefect logs and stores the error of a task.
        if (text := without_userinfo(str(e))) != str(e):
            raise type(e)(text) from None
        raise
    result = {"stage": artifact.stage, "key": artifact.key, "digest": artifact.digest}
    if state == "hit":
        return Completed(name="Cached", message=f"{artifact.stage}/{artifact.key[:12]}", data=result)
    reporter = session.reporter
    assert isinstance(reporter, PrefectReporter)
    with errors_logged():
        show_artifact(reporter.display, session, node, artifact)
    return Completed(message=find_stage(artifact.stage).figures(artifact.metrics) or "made", data=result)


def is_dead_worker(task: Any, task_run: Any, state: State[Any]) -> bool:
    """Whether another attempt may help: after the death of a worker, not after an error that a stage raised."""
    return isinstance(state.result(raise_on_failure=False), WorkerDied)


# Prefect names a deployment's entrypoint after the function: it has to be the name of the flow.
@flow(
    name=NAME,
    description="Data, SFT, distillation, preference, reward model, RL, evaluation, export; cached and resumable.",
    validate_parameters=True,
    persist_result=False,
)
@recipe_parameters
def rlhf_pipeline(
    recipe: str = "demo",
    run_name: str | None = None,
    force: list[str] | None = None,
    only: list[str] | None = None,
    skip: list[str] | None = None,
    **fields: Any,
) -> State[Any]:
    """Runs a recipe. Fields of the recipe may be set too; others keep the values of the recipe.

    With a gate it ends in a state with the name Promoted, Refused or Nothing new, and the type Completed.

    Args:
        recipe: A built-in recipe's name or the path of a YAML file.
        run_name: Name of the run; generated if empty.
        force: Stages or nodes (round-003.update) to recompute although they are cached.
        only: Stages or nodes to run, with their inputs; empty runs all.
        skip: Sections of the recipe to leave out.
    """
    from_command = _resolved.get()
    reporter = PrefectReporter(silent=from_command is None)
    reporter.console.line_start = line_start(run_name)
    try:
        resolved, standing = from_command or (load_recipe(recipe, values_of(fields) | dict.fromkeys(skip or [])), None)
        if from_command is None:
            check(resolved)
            try_algorithm(resolved)
        name = free_name(resolved, run_name)
        session = Session(resolved, reporter, name, None, standing)
        reporter.recipe = resolved.name
    except Exception as e:
        if from_command is not None:
            raise
        if not isinstance(e, EXPECTED):
            _log_traceback(e)
        return Failed(message=without_userinfo(f"no run of recipe {recipe} began: {e}"))
    if runtime.deployment.name:
        session.command["command"] = f"prefect deployment run {NAME}/{runtime.deployment.name}"
    try:
        return _run(session, force or [], only or [])
    finally:
        reporter.display.finish(SHOWN_SECONDS)
        if from_command is not None:
            with errors_logged():
                give_up_soon()


def free_name(recipe: Recipe, wanted: str | None) -> str:
    """Return the run's name: the wanted one, else the flow run's. Later attempts of one flow run are numbered."""
    shown, attempt = str(runtime.flow_run.name), runtime.flow_run.run_count
    name = wanted or (shown if shown.startswith(f"{recipe.name}-") else f"{recipe.name}-{shown}")
    if attempt > 1:
        return f"{name}-{attempt}"
    # Prefect draws two words for each flow run, which earlier runs may have.
    if wanted is None and runs.exists(Store(recipe.store), name):
        name = f"{name}-{str(runtime.flow_run.id)[-8:]}"
    return name


def _run(session: Session, force: list[str], only: list[str]) -> State[Any]:
    """Run the session's nodes as tasks; return the flow's state, with the run's name, status and scores."""
    recipe, reporter = session.recipe, session.reporter
    assert isinstance(reporter, PrefectReporter)
    _sessions[session.name] = session
    cancellation = Cancellation(session.stop)
    states: dict[str, State[Any]] = {}
    try:
        with errors_logged():
            label_flow_run(session.name if runtime.flow_run.run_count <= 1 else None, f"recipe:{recipe.name}")
            show_command(reporter.display, session, _command(session))
        reporter.console.print(f"run {session.name}  store {session.store.shown}")
        session.force = select(session.nodes, force)
        chosen = with_inputs(session.nodes, select(session.nodes, only)) if only else None
        task = stage_task.with_options(retries=recipe.retries, retry_condition_fn=is_dead_worker)

        def make(node: str) -> object:
            # Prefect draws an edge from each input.
            inputs = dict.fromkeys(source.node for source in session.nodes[node].inputs.values())
            needs = [states[name] for name in inputs if name in states]
            states[node] = task(session.name, node, return_state=True, wait_for=needs)
            return states[node].result(raise_on_failure=True)

        run_stages(session, chosen, make)
    except BaseException as raised:
        e = _own(raised)
        close(session, status_after(e), e)
        if _resolved.get() is not None:
            _errors[session.name] = e
        if cancellation.is_asked():
            return Cancelled(message=f"Cancelled; finished stages are kept. Type: {_command(session)}")
        if isinstance(e, Exception):
            return _failed(session, e)
        raise
    finally:
        cancellation.end()
        _sessions.pop(session.name)
    # Display last, and guarded: by now everything is in the store.
    status = status_at_end(session)
    report = close(session, status)
    found = findings(session)
    with errors_logged():
        show_run(reporter.display, session, report, found, _command(session))
    summary(session, reporter, report, found)
    scores = {label: metrics["score"] for label, metrics in evaluations_of(session).items()}
    decision = session.record.get("decision") or {}
    name = DECIDED.get(decision.get("decision", ""), "Completed")
    if recipe.gate is not None and decision.get("decision") == PROMOTED:
        with errors_logged():
            label_flow_run(None, recipe.gate.name)
    said = "; ".join(decision.get("reasons", [])) or None
    if status == REFUSED:
        said = f"{said}. Type: {_command(session)}; {_command(session, 'champions')}"
    data = {"run": session.name, "status": status, "evaluations": scores}
    return Completed(name=name, message=said, data=data)


def _command(session: Session, command: str = "") -> str:
    """Return a command that a person can type on the run's machine, or anywhere if the store is remote."""
    store = session.store
    words = ["rlhf", command or "show", *([] if command else [session.name])]
    return shlex.join([*words, "--store", store.root if store.is_local else store.shown])


def _failed(session: Session, error: Exception) -> State[Any]:
    """Return the flow's last state after an error; alerts forward its message."""
    said = str(error) or type(error).__name__
    if not isinstance(error, EXPECTED) and not is_unreachable(error):
        _log_traceback(error)
        said = f"{type(error).__name__}: {error}"
    # Prefect gives the same name to its own limits of time: automations can tell it from other failures.
    name = "TimedOut" if isinstance(error, RunTooLong) else "Failed"
    said = without_userinfo(said).rstrip(".")
    return Failed(name=name, message=f"run {session.name}: {said}. Type: {_command(session)}", data=_kept(error))


def _kept(error: Exception) -> Exception | None:
    """The error, for the command line. Under a worker Prefect would log it with the URLs of its text."""
    return error if _resolved.get() is not None else None


def _log_traceback(error: Exception) -> None:
    trace = without_userinfo("".join(traceback.format_exception(error)))
    get_run_logger().error("the run ended with an unexpected error\n%s", trace)


def _own(error: BaseException) -> BaseException:
    """Return the run's own error if Prefect's client raised another because it could not report it to the server."""
    found: BaseException | None = error if isinstance(error, TransportError) else None
    while found is not None and not isinstance(found, StageFailed | WorkerDied | RunTooLong | KeyboardInterrupt):
        found = found.__context__
    return found or error


def run_recipe(
    recipe: Recipe,
    *,
    name: str | None,
    force: set[str] | None,
    only: set[str] | None,
    standing: Standing | None,
) -> str:
    """Run the flow in this process for the command line; return the run's status."""
    name = name or f"{recipe.name}-{generate_slug(2)}"
    values = recipe.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude={"name", "description"})
    shown = published(values)
    options = {"run_name": name, "force": sorted(force or []), "only": sorted(only or [])}
    # Prefect fills in braces in a run's name. The recipe is valid already, and its values are JSON here.
    local = rlhf_pipeline.with_options(flow_run_name=re.sub(r"[{}]", "", name), validate_parameters=False)
    token = _resolved.set((recipe, standing))
    try:
        state: Any = local(recipe.name, **options, **shown, return_state=True)
    except TransportError as e:
        error = _errors.get(name, e)
        if isinstance(error, TransportError):
            raise
        raise error from e
    finally:
        _resolved.reset(token)
        _errors.pop(name, None)
        # It ends services that other runs use.
        if SHARING.get() is None:
            send_events()
    wait_until_recorded(state.state_details.flow_run_id)
    if state.is_cancelling() or state.is_cancelled():
        # It may have ended before it noticed.
        status = runs.head(Store(recipe.store), name)["status"]  # type: ignore[index]
        ended: State[Any] | None = None if status == "interrupted" else Completed(name=DECIDED.get(status))
        if ended or state.is_cancelling():
            # Somebody cancelled it after the last question: the server accepts no other state.
            with errors_logged(), get_client(sync_client=True) as client:
                client.set_flow_run_state(state.state_details.flow_run_id, ended or Cancelled(), force=True)
        if ended:
            return status
        raise KeyboardInterrupt("cancelled in Prefect")
    result: dict[str, Any] = state.result(raise_on_failure=True)
    return str(result["status"])

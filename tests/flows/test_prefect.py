"""The flow on a real Prefect server with a real worker: deployment, cache, retries, schedule, artifacts, UI."""

import contextlib
import datetime
import json
import logging
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf.flows.recipe.overrides import values_of
from rlhf.stages.store.artifacts import Store
from tests.browser import browse
from tests.flows.prefect_server import PROJECT, Prefect, prefect_server, wait_for
from tests.support import RLHF

FLOW = "rlhf-pipeline"
NODES = {"base", "prepare", "sft", "reward", "evaluate.base", "evaluate.sft", "evaluate.rl", "export"} | {
    f"round-{i:03}.{part}" for i in range(3) for part in ("rollout", "score", "update")
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="module")
def prefect(folder: Path, prefect_database: Path) -> Iterator[Prefect]:
    """A server with a work pool and the project's deployment."""
    with prefect_server(folder, ui=True, shared=prefect_database) as server:
        server.pool("local")
        server.command("deploy", "--name", "default")
        yield server


@pytest.fixture(scope="module")
def worker(prefect: Prefect) -> Iterator[psutil.Process]:
    with prefect.running("worker", "worker", "start", "--pool", "local") as process:
        yield psutil.Process(process.pid)


@pytest.fixture(scope="module")
def due(prefect: Prefect, worker: psutil.Process, folder: Path) -> dict[str, Any]:
    """A deployment like the project's whose cron comes round within the next minute and a bit."""
    default = prefect.get(f"/deployments/name/{FLOW}/default")
    when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=72)
    cron = {"cron": f"{when.minute} {when.hour} * * *", "timezone": "UTC"}
    same = {k: default[k] for k in ("flow_id", "entrypoint", "path", "pull_steps", "parameter_openapi_schema")}
    parameters = {"recipe": "smoke", "store": str(folder / "scheduled"), "only": ["base"]}
    schedules = [{"schedule": cron, "active": True}]
    more = {"name": "due", "work_pool_name": "local", "parameters": parameters, "schedules": schedules}
    return prefect.post("/deployments/", **same, **more)


@pytest.fixture(scope="module")
def made(prefect: Prefect, worker: psutil.Process, due: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A run whose stage worker is killed once and which another run collides with."""
    options = ["--param", "recipe=smoke", "--param", f"store={folder / 'store'}", "--flow-run-name", "smoke-made"]
    prefect.command("deployment", "run", f"{FLOW}/default", *options)
    started = prefect.flow_run("smoke-made")
    wait_for(lambda: stage_worker(worker, started), 300, "a stage at work").kill()
    create(prefect, "smoke-too-many", {"recipe": "smoke", "store": str(folder / "store")})
    return prefect.ended("smoke-made", 180)


@pytest.fixture(scope="module")
def cached(prefect: Prefect, made: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same run once more, started from another folder; its name is taken, because Prefect draws names at random."""
    options = ["--param", "recipe=smoke", "--param", f"store={folder / 'store'}", "--flow-run-name", "made"]
    prefect.command("deployment", "run", f"{FLOW}/default", *options, cwd=folder)
    return prefect.ended_run(prefect.flow_run("made")["id"], 90)


def create(prefect: Prefect, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    deployment = prefect.get(f"/deployments/name/{FLOW}/default")["id"]
    return prefect.post(f"/deployments/{deployment}/create_flow_run", name=name, parameters=parameters)


def stage_worker(worker: psutil.Process, flow_run: dict[str, Any]) -> psutil.Process | None:
    """The process that runs the stages of a flow run."""
    for process in worker.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get("PREFECT__FLOW_RUN_ID") == flow_run["id"]
            if mine and "rlhf.stages.worker.process" in process.cmdline():
                return process
    return None


def record(folder: Path, name: str) -> dict[str, Any]:
    found = Store(str(folder)).read_json("runs", name, "run.json")
    assert found is not None
    return found


@pytest.mark.slow
def test_the_form_describes_every_field_of_the_recipe(prefect: Prefect) -> None:
    schema = prefect.get(f"/deployments/name/{FLOW}/default")["parameter_openapi_schema"]
    sections = {"base", "data", "sft", "reward", "rl", "evaluate", "export", "seed", "store", "retries"}
    assert sections <= set(schema["properties"])
    assert all(p["description"] for p in schema["properties"].values())
    models = schema["definitions"]
    assert all(f.get("description") for m in models.values() for f in m["properties"].values())
    # Everything else has a default; the rounds of before a fork have none, and are written by `rlhf fork`.
    assert {name for name, m in models.items() if "required" in m} == {"Earlier"}
    assert all(m["additionalProperties"] is False for m in models.values())


@pytest.mark.slow
def test_a_deployment_runs_every_stage(prefect: Prefect, made: dict[str, Any], folder: Path) -> None:
    assert made["state_name"] == "Completed", made["state"]
    tasks = prefect.task_runs(made)
    assert set(tasks) == NODES
    assert {t["state_name"] for t in tasks.values()} == {"Completed"}
    assert record(folder / "store", "smoke-made")["status"] == "finished"


@pytest.mark.slow
def test_a_killed_worker_is_a_retry_of_the_task(prefect: Prefect, made: dict[str, Any], folder: Path) -> None:
    task = prefect.task_runs(made)["base"]
    history = prefect.get(f"/task_run_states/?task_run_id={task['id']}")
    names = [s["name"] for s in sorted(history, key=lambda s: s["timestamp"])]
    assert names[-3:] == ["AwaitingRetry", "Retrying", "Completed"], names
    assert record(folder / "store", "smoke-made")["worker_starts"] == 2


@pytest.mark.slow
def test_a_run_that_would_overlap_waits_for_the_one_before_it(prefect: Prefect, made: dict[str, Any]) -> None:
    waited = prefect.ended("smoke-too-many", 180)
    assert waited["state_type"] == "COMPLETED", waited["state"]
    assert waited["start_time"] > made["end_time"]


@pytest.mark.slow
def test_a_run_leaves_artifacts_to_look_at(prefect: Prefect, made: dict[str, Any], folder: Path) -> None:
    found = prefect.artifacts(made)
    kinds = {"smoke-sft-metrics": "table", "smoke-evaluation": "table", "smoke-rollout-sample": "markdown"}
    assert {k: found[k]["type"] for k in kinds} == kinds
    assert [r["policy"] for r in json.loads(found["smoke-evaluation"]["data"])] == ["base", "sft", "rl"]
    assert found["smoke-curves"]["data"].startswith("![curves](data:image/png;base64,")
    report = found["smoke-report"]["data"]
    assert f"`{folder / 'store' / 'runs' / 'smoke-made' / 'report.html'}`" in report
    assert "pass@2" in report and "SFT against base" in report
    # A key's page is a history: of the runs of a recipe and, for a stage of a round, of the rounds.
    metrics = {f"smoke-{n.rpartition('round-')[2].partition('.')[2] or n}" for n in NODES if n.startswith("round-")}
    assert {f"{name}-metrics" for name in metrics} | {"smoke-evaluate-base-metrics"} <= set(found)
    of_rollouts = prefect.post("/artifacts/filter", artifacts={"key": {"any_": ["smoke-rollout-metrics"]}})
    rounds = {a["description"].partition(" ")[0] for a in of_rollouts if a["flow_run_id"] == made["id"]}
    assert rounds == {f"round-00{i}.rollout" for i in range(3)}


@pytest.mark.slow
def test_the_graph_of_a_run_has_edges_and_its_page_has_tags(prefect: Prefect, made: dict[str, Any]) -> None:
    assert "recipe:smoke" in made["tags"]
    tasks = prefect.task_runs(made)
    names = {task["id"]: name for name, task in tasks.items()}
    of_update = {names[one["id"]] for one in tasks["round-001.update"]["task_inputs"]["wait_for"]}
    assert {"round-000.update", "round-001.rollout", "round-001.score"} <= of_update


@pytest.mark.slow
def test_a_second_run_is_cached_and_starts_no_worker(prefect: Prefect, cached: dict[str, Any], folder: Path) -> None:
    assert cached["state_name"] == "Completed", cached["state"]
    tasks = prefect.task_runs(cached)
    assert set(tasks) == NODES
    assert {t["state_name"] for t in tasks.values()} == {"Cached"}
    assert {t["state_type"] for t in tasks.values()} == {"COMPLETED"}
    assert record(folder / "store", cached["name"])["worker_starts"] == 0


@pytest.mark.slow
def test_a_name_that_is_taken_is_made_another_one_in_the_store_and_in_prefect(cached: dict[str, Any]) -> None:
    assert cached["name"] == f"smoke-made-{cached['id'][-8:]}"


@pytest.mark.slow
def test_a_wrong_parameter_is_refused_before_there_is_a_run(prefect: Prefect, made: dict[str, Any]) -> None:
    # The server's own scheduler may add runs at any time.
    asked = {"tags": {"is_null_": True}}
    before = prefect.post("/flow_runs/count", flow_runs=asked)
    unknown = {
        'sft={"optimizer": {"lr": 1}}': "'sft.optimizer'. Failure reason: Additional properties are not allowed ('lr'",
        "learning_rate=1": "not found on the deployment: 'learning_rate'",
    }
    for parameter, words in unknown.items():
        output = prefect.command("deployment", "run", f"{FLOW}/default", "--param", parameter, code=1)
        assert words in " ".join(output.split())
    deployment = prefect.get(f"/deployments/name/{FLOW}/default")["id"]
    for wrong in {"rl": {"rounds": 0}}, {"sft": {"epochs": "2"}}, {"seed": 1.5}:
        answer = prefect.http.post(f"/deployments/{deployment}/create_flow_run", json={"parameters": wrong})
        assert answer.status_code == 409 and "Validation failed" in answer.text, answer.text
    assert prefect.post("/flow_runs/count", flow_runs=asked) == before


@pytest.mark.slow
def test_cancelling_a_run_ends_its_stage_worker(
    prefect: Prefect, made: Any, worker: psutil.Process, folder: Path
) -> None:
    run = create(prefect, "smoke-cancelled", {"recipe": "smoke", "store": str(folder / "store"), "force": ["base"]})
    process = wait_for(lambda: stage_worker(worker, run), 300, "a stage at work")
    prefect.post(f"/flow_runs/{run['id']}/set_state", state={"type": "CANCELLING", "name": "Cancelling"})
    ended = prefect.ended("smoke-cancelled", 60)
    assert ended["state_type"] == "CANCELLED", ended["state"]
    wait_for(lambda: not process.is_running(), 10, "the end of the stage worker")
    assert record(folder / "store", "smoke-cancelled")["status"] == "interrupted"


def test_cron_fires(prefect: Prefect, due: dict[str, Any]) -> None:
    query = {"deployments": {"id": {"any_": [due["id"]]}}, "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    done = wait_for(lambda: prefect.post("/flow_runs/filter", **query), 120, "a scheduled run")
    assert [run["auto_scheduled"] for run in done] == [True]
    assert set(prefect.task_runs(done[0])) == {"base"}
    # A server that is busy with its database answers 503.
    wait_for(lambda: prefect.http.delete(f"/deployments/{due['id']}").status_code in (204, 404), 60, "its end")


@pytest.mark.slow
def test_the_page_of_a_cached_run_says_so(prefect: Prefect, cached: dict[str, Any]) -> None:
    page = f"{prefect.ui}/runs/flow-run/{cached['id']}"
    for seconds in 20, 60, 120:  # of the page's own clock; how many it needs depends on the machine
        text = browse(page, "--dump-dom", f"--virtual-time-budget={seconds * 1000}", width=1400, height=1200)
        if all(node in text for node in NODES) and "Cached" in text:
            return
    raise AssertionError(text)


@pytest.mark.slow
def test_rlhf_run_needs_no_server_and_is_quiet(made: dict[str, Any], folder: Path) -> None:
    home = folder / "fresh"
    env = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT")} | {"PREFECT_HOME": str(home)}
    # Of cached stages alone it starts no server at all.
    sets = ["--set", f"store={folder / 'store'}", "--set", "export.name=alone"]
    command = [RLHF, "run", "smoke", "--name", "alone", *sets]
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("run alone ") and " | INFO" not in done.stdout and "http://" not in done.stdout
    assert record(folder / "store", "alone")["worker_starts"] == 1
    with contextlib.closing(sqlite3.connect(home / "prefect.db")) as database:
        assert database.execute("select name, state_name from flow_run").fetchall() == [("alone", "Completed")]
        cached = {(name, "Cached") for name in NODES - {"export"}}
        assert set(database.execute("select name, state_name from task_run")) == {*cached, ("export", "Completed")}


def test_a_deployment_of_the_flow_object_can_be_loaded() -> None:
    from prefect.flows import load_flow_from_entrypoint

    from rlhf.flows.pipeline import rlhf_pipeline

    deployment = rlhf_pipeline.to_deployment("nightly")
    assert load_flow_from_entrypoint(deployment.entrypoint).name == rlhf_pipeline.name


def test_each_section_of_the_form_has_a_name_of_its_own() -> None:
    from rlhf.flows.pipeline import rlhf_pipeline

    models = rlhf_pipeline.parameters.definitions
    # Pydantic puts the whole path, with underscores, into names that it has to tell apart.
    assert [name for name in models if "__" in name] == []
    assert {"data", "update", "sft"} <= {model.get("title") for model in models.values()}


@pytest.mark.slow
def test_parameters_are_strict_and_keep_only_what_was_said() -> None:
    from prefect.exceptions import ParameterTypeError

    from rlhf.flows.pipeline import rlhf_pipeline

    logging.getLogger("prefect.flows").disabled = True
    for section, wrong, words in [
        ("sft", {"optimizer": {"lr": 1}}, "sft.optimizer.lr: unknown key"),
        ("sft", {"epochs": "2"}, "sft.epochs: Input should be a valid integer"),
        ("rl", {"rounds": 0}, "rl.rounds: Input should be greater"),
        ("seed", 1.5, "seed: Input should be a valid integer"),
    ]:
        with pytest.raises(ParameterTypeError, match=words):
            rlhf_pipeline.validate_parameters({section: wrong})
    rewards = {"score": {"rewards": {"exact": {"weight": 2.0}}}}
    said = {"recipe": "ppo", "data": {"system_prompt": None}, "rl": rewards, "sft": {"optimizer": {"learning_rate": 1}}}
    assert values_of(rlhf_pipeline.validate_parameters(said)) == said

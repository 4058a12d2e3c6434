"""Workers in work pools of a real Prefect server, on an S3 store: they make what one here would, and each may die."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows.orchestration import deployments, pools
from flows.orchestration.deployments import check_pools
from flows.orchestration.pools import PoolWorker
from flows.recipe.model import RecipeError
from flows.recipe.reading import load_recipe
from stages.store.artifacts import Store
from stages.worker import away, mailbox, sameness
from stages.worker.client import StageFailed, WorkerDied
from stages.worker.protocol import Done, Log, event_line
from tests.flows.prefect_server import Prefect, prefect_server, wait_for
from tests.stages.worker.support import ignore, request

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path, s3: str) -> Iterator[Prefect]:
    """A server with pools, one of them with hosts; this process is set to it."""
    folder = tmp_path_factory.mktemp("pools")
    with prefect_server(folder, shared=prefect_database) as server, pytest.MonkeyPatch.context() as patch:
        for name in ("PREFECT_HOME", "PREFECT_API_URL"):
            patch.setenv(name, server.env[name])
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
        for pool, limit in (("gpus", None), ("far", 1), ("empty", None)):
            server.pool(pool, limit)
        server.command("deploy", "flows/worker.py:rlhf_worker", "--name", "gpus", "--pool", "gpus")
        made = server.get("/deployments/name/rlhf-worker/gpus")
        same = {k: made[k] for k in ("flow_id", "entrypoint", "path", "pull_steps", "parameter_openapi_schema")}
        server.post("/deployments/", name="far", work_pool_name="far", **same)
        yield server
    refresh_global_settings_context()


@pytest.fixture(scope="module")
def host(prefect: Prefect) -> Iterator[psutil.Process]:
    """Prefect's worker on the host of the pool `gpus`, whose scratch folder no other sees."""
    prefect.env = prefect.env | {"RLHF_SCRATCH": str(prefect.folder / "scratch-gpus")}
    with prefect.running("worker", "worker", "start", "--pool", "gpus") as process:
        yield psutil.Process(process.pid)


@pytest.fixture
def recipe(s3: str, tmp_path):
    return load_recipe(
        "smoke", sets=[f"store={s3}/{tmp_path.name}", "workers.train={pool: gpus}", "workers.silence_seconds=15"]
    )


@pytest.fixture
def worker(recipe, host: psutil.Process, tmp_path) -> Iterator[PoolWorker]:
    made = PoolWorker(recipe, f"run-{tmp_path.name}", "train", recipe.workers.train, tmp_path / "worker-train.log")
    yield made
    made.finish()
    # Its process ends behind its word that it leaves.
    wait_for(lambda: not processes(host, "stages.worker.process"), 90, "the host to be idle")


def ask(recipe, seed=7, **changed):
    asked = dataclasses.replace(request("store"), store=recipe.store, key=f"{seed:064x}", seed=seed)
    return dataclasses.replace(asked, **changed)


def processes(host: psutil.Process, what: str) -> list[psutil.Process]:
    found = []
    for process in host.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if what in " ".join(process.cmdline()):
                found.append(process)
    return found


def at_work(host: psutil.Process) -> psutil.Process:
    """The process of a stage, stopped before it can make one."""
    found = wait_for(lambda: processes(host, "stages.worker.process"), 120, "a process of stages")
    found[0].suspend()
    return found[0]


def in_thread(worker: PoolWorker, asked, on_event=ignore, check=lambda: None):
    """What a request ends with: its thread, and a list that gets the error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            worker.run(asked, on_event, check)
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def ended(thread: threading.Thread, seconds: float) -> None:
    thread.join(seconds)
    assert not thread.is_alive()


def flow_run(prefect: Prefect, worker: PoolWorker, state: str) -> None:
    name = f"{worker._run} train"

    def over() -> bool:
        found = prefect.post("/flow_runs/filter", flow_runs={"name": {"any_": [name]}})
        return bool(found) and {run["state_type"] for run in found} == {state}

    wait_for(over, 90, f"{name} to be {state}")


def test_one_in_a_pool_stays_for_the_next_stage_also_where_one_fails_and_leaves_with_the_run(
    prefect, host, worker, recipe
):
    events: list = []
    for seed in (1, 2):
        manifest = worker.run(ask(recipe, seed), events.append)
        found = Store(recipe.store).get("base", f"{seed:064x}")
        assert found is not None and found.manifest == manifest
        # An error says on which host it was.
        with pytest.raises(StageFailed, match=r"(?s)nowhere.*\(pool gpus\)"):
            worker.run(ask(recipe, 3, config={"source": "nowhere"}), ignore)
        with pytest.raises(StageFailed, match="module stages.base is other code here than where the run is"):
            worker.run(ask(recipe, 4, files={"stages.base": "0" * 64}), ignore)
    assert worker.starts == 1 and len(processes(host, "stages.worker.process")) == 1
    told = [event.line for event in events if isinstance(event, Log)]
    assert any(line.startswith("a worker of pool gpus is at work on ") for line in told)
    log = f"worker-train.{worker._at.box._place[-1].removeprefix('train-')}.log"
    worker.finish()
    flow_run(prefect, worker, "COMPLETED")
    store = Store(recipe.store)
    assert store.names("runs", worker._run) == [log]
    assert b"---- base" in store.fs.cat_file(store.join("runs", worker._run, log))
    assert store.names("mail", worker._run) == []


@pytest.mark.slow
def test_a_killed_process_of_stages_is_told_and_the_next_request_has_another(host, worker, recipe):
    thread, errors = in_thread(worker, ask(recipe, 6))
    at_work(host).kill()
    ended(thread, 60)
    assert isinstance(errors[0], WorkerDied) and "(pool gpus)" in str(errors[0]) and "SIGKILL" in str(errors[0])
    worker.run(ask(recipe, 6), ignore)
    assert worker.starts == 1


@pytest.mark.slow
def test_a_killed_flow_run_is_told_by_prefect_and_the_next_request_asks_for_another(prefect, host, worker, recipe):
    thread, errors = in_thread(worker, ask(recipe, 8))
    stage = at_work(host)
    stage.parent().kill()
    stage.resume()
    ended(thread, 90)
    assert isinstance(errors[0], WorkerDied)
    assert "has ended (Crashed" in str(errors[0]) and "stage base" in str(errors[0])
    stage.wait(10)
    worker.run(ask(recipe, 8), ignore)
    assert worker.starts == 2


@pytest.mark.slow
def test_a_host_that_falls_silent_is_told_and_cancelled(prefect, host, worker, recipe):
    thread, errors = in_thread(worker, ask(recipe, 9))
    stage = at_work(host)
    flow = stage.parent()
    flow.suspend()
    ended(thread, 60)
    assert isinstance(errors[0], WorkerDied) and "has been silent for 15 s" in str(errors[0])
    flow.resume()
    # It learns of its end as soon as it can.
    psutil.wait_procs([flow, stage], timeout=60)
    assert not flow.is_running() and not stage.is_running()


@pytest.mark.slow
def test_one_that_died_while_nothing_was_asked_of_it_costs_no_try(host, worker, recipe):
    worker.run(ask(recipe, 14), ignore)
    (stage,) = processes(host, "stages.worker.process")
    stage.parent().kill()
    stage.wait(30)
    worker.run(ask(recipe, 15), ignore)
    assert worker.starts == 2


def test_a_hanging_server_is_waited_for_for_seconds_also_inside_of_a_flow(prefect):
    from prefect import flow

    @flow
    def asks() -> float:
        with deployments.answering() as client:
            return float(client._client.timeout.read)

    assert asks() == deployments.ASK_SECONDS


@pytest.mark.slow
def test_what_ends_a_run_ends_its_workers_elsewhere(prefect, host, worker, recipe):
    stop: list[bool] = []

    def check() -> None:
        if stop:
            raise KeyboardInterrupt

    thread, errors = in_thread(worker, ask(recipe, 10), check=check)
    stage = at_work(host)
    stop.append(True)
    ended(thread, 30)
    assert isinstance(errors[0], KeyboardInterrupt)
    psutil.wait_procs([stage], timeout=60)
    assert not stage.is_running()


def test_a_pool_without_hosts_is_waited_for_and_what_is_missing_is_told(prefect, s3, tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "WAIT_SECONDS", 1.0)
    monkeypatch.setattr(pools, "LOOK_SECONDS", 1.0)
    recipe = load_recipe("smoke", sets=[f"store={s3}/{tmp_path.name}", "workers.train={pool: far}"])
    waiting = PoolWorker(recipe, f"run-{tmp_path.name}", "train", recipe.workers.train, tmp_path / "log")
    told: list[str] = []

    def check() -> None:
        if told:
            raise KeyboardInterrupt

    def hear(event) -> None:
        told.append(event.line)

    with pytest.raises(KeyboardInterrupt):
        waiting.run(ask(recipe), hear, check)
    assert "waits for a worker of pool far" in told[0] and "`prefect worker start --pool far`" in told[0]
    flow_run(prefect, waiting, "CANCELLED")


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["workers.train={pool: nowhere}"], "workers.train.pool: the Prefect server .* has no work pool nowhere"),
        (["workers.train={pool: empty}"], "`prefect deploy flows/worker.py:rlhf_worker --name empty --pool empty`"),
        (["workers.train={pool: far}", "workers.data={pool: far}"], "pool far runs 1 at a time, .* 2 workers"),
    ],
)
def test_pools_that_cannot_do_are_refused_before_a_run_is_recorded(prefect, tmp_path, sets, said):
    with pytest.raises(RecipeError, match=said):
        check_pools(load_recipe("smoke", sets=[f"store={tmp_path}", *sets]))


def test_a_worker_that_sees_another_store_says_so(tmp_path):
    with pytest.raises(away.RunGone, match="has no mail/r/m .* one that all of their hosts see"):
        away.serve(Store(str(tmp_path)), ("mail", "r", "m"), tmp_path / "log", 60.0, 60.0)


@pytest.mark.slow
def test_one_that_nothing_is_asked_of_gives_its_place_away_and_the_next_request_has_another(
    prefect, host, worker, recipe
):
    worker._idle = 10.0
    worker.run(ask(recipe, 11), ignore)
    flow_run(prefect, worker, "COMPLETED")
    worker.run(ask(recipe, 12), ignore)
    assert worker.starts == 2


@pytest.mark.slow
def test_another_commit_of_a_host_is_told_by_the_file(host, worker, recipe):
    worker._same = worker._same | {"stages/base.py": "0"}
    with pytest.raises(StageFailed, match="stages/base.py is another here than where the run is"):
        worker.run(ask(recipe, 16), ignore)


def test_a_trainer_whose_policies_are_not_all_stored_stays(prefect, s3, tmp_path):
    sets = [f"store={s3}/x", "workers={train: {pool: gpus}, data: {pool: gpus}, idle_seconds: 10}"]
    recipe = load_recipe("smoke", sets=[*sets, "rl.checkpoint_every=2"])
    for work, idle in (("train", None), ("data", 10.0)):
        settings = recipe.workers.settings(work)
        assert PoolWorker(recipe, "r", work, settings, tmp_path / "log")._idle == idle
    stored = load_recipe("smoke", sets=[*sets, "rl.checkpoint_every=1"])
    assert PoolWorker(stored, "r", "train", stored.workers.train, tmp_path / "log")._idle == 10.0


def test_a_request_that_arrives_as_the_worker_leaves_idle_is_asked_of_another(tmp_path, monkeypatch):
    """Its mailbox has seen the line, and nobody takes it up."""
    monkeypatch.setattr(mailbox, "POLL_SECONDS", 0.02)
    store = Store(str(tmp_path))
    recipe = load_recipe("smoke", sets=[f"store={tmp_path}", "workers.train={pool: gpus}"])
    made = PoolWorker(recipe, "r", "train", recipe.workers.train, tmp_path / "log")

    def pair(name):
        sides = [mailbox.Mailbox(store, ("mail", "r", name), side) for side in (mailbox.RUN, mailbox.WORKER)]
        for side in sides:
            side.start()
        return pools._FlowRun("no-such-run", name, sides[0], time.monotonic(), host="there"), sides[1]

    (made._at, leaving), (another, working) = pair("one"), pair("two")
    first = made._at.box

    def start(check_time):
        made._at = another
        return another

    monkeypatch.setattr(made, "_start", start)
    monkeypatch.setattr(PoolWorker, "_set_cancelling", staticmethod(lambda _: False))
    thread, errors = in_thread(made, ask(recipe))
    assert leaving.receive(20) is not None
    wait_for(lambda: first.has_seen(0), 20, "the word that it has arrived")
    leaving.send('{"idle": 10}')
    leaving.leave()
    assert working.receive(20) is not None
    working.send(event_line(Done({})))
    ended(thread, 20)
    assert errors == []
    for side in (another.box, working):
        side.close()


def test_a_flow_run_that_is_started_again_takes_no_other_ones_mailbox(tmp_path):
    store = Store(str(tmp_path))
    for side in (mailbox.RUN, mailbox.WORKER):
        mailbox.Mailbox(store, ("mail", "r", "m"), side)._write()
    with pytest.raises(away.RunGone, match="mail/r/m had a worker already"):
        away.serve(store, ("mail", "r", "m"), tmp_path / "log", 60.0, 60.0)


@pytest.mark.slow
def test_an_environment_that_would_change_bits_is_refused_by_its_name(host, worker, recipe, monkeypatch):
    monkeypatch.setenv("JAX_DEFAULT_PRNG_IMPL", "rbg")
    worker._same = sameness.of_this_host()
    with pytest.raises(StageFailed, match="JAX_DEFAULT_PRNG_IMPL is not set here and rbg where the run is"):
        worker.run(ask(recipe, 13, key_parts={"device": "cpu:cpu"}), ignore)


def test_passwords_are_given_to_no_pool(prefect, s3, tmp_path):
    sets = ["workers.train={pool: gpus}", "store=s3://me:word@bucket/x"]
    with pytest.raises(RecipeError, match="store: its address holds a password"):
        check_pools(load_recipe("smoke", sets=sets))


def test_a_worker_whose_run_is_silent_leaves(tmp_path):
    store = Store(str(tmp_path))
    box = mailbox.Mailbox(store, ("mail", "r", "m"), mailbox.RUN)
    box._write()
    since = time.monotonic()
    with pytest.raises(away.RunGone, match="silent for 2 s"):
        away.serve(store, ("mail", "r", "m"), tmp_path / "log", silence=2.0, idle=60.0)
    assert time.monotonic() - since < 60

"""A run whose data is prepared on one host and whose policies are trained on another: its artifacts are those of one
worker, and each host may die."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from stages.store.artifacts import Store
from tests.flows.prefect_server import Prefect, prefect_server, wait_for
from tests.support import RLHF

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
POOLS = ("cpus", "gpus")
WORKERS = "workers={train: {pool: gpus}, data: {pool: cpus}, sample: {}, silence_seconds: 20}"


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory, s3: str) -> Iterator[Prefect]:
    with prefect_server(tmp_path_factory.mktemp("pools")) as server:
        for pool in POOLS:
            server.command("work-pool", "create", pool, "--type", "process")
            server.command("deploy", "flows/worker.py:rlhf_worker", "--name", pool, "--pool", pool)
        yield server


@contextlib.contextmanager
def host(prefect: Prefect, pool: str) -> Iterator[psutil.Process]:
    """A host of a pool, with a scratch folder and a home that no other sees."""
    before = prefect.env
    prefect.env = before | {"RLHF_SCRATCH": str(prefect.folder / f"scratch-{pool}"), "HOME": str(prefect.folder / pool)}
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(prefect.running(f"host-{pool}", "worker", "start", "--pool", pool))
        prefect.env = before
        yield psutil.Process(process.pid)


def ends(process: psutil.Process) -> None:
    """A host dies: nothing of it says another word."""
    family = [process, *process.children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.suspend()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def command(store: str, name: str) -> list[str]:
    return [str(RLHF), "run", "smoke", "--store", store, "--name", name, "--set", WORKERS]


def begun(prefect: Prefect, store: str, name: str) -> subprocess.Popen[bytes]:
    env = prefect.env | {"RLHF_SCRATCH": str(prefect.folder / "scratch-run")}
    log = (prefect.folder / f"{name}.out").open("wb")
    return subprocess.Popen(command(store, name), env=env, stdout=log, stderr=log, start_new_session=True)


def entries(store: str, name: str) -> dict:
    from stages.store import runs

    found = runs.read(Store(store), name) or {"nodes": {}}
    return found["nodes"]


def running(prefect: Prefect, store: str, name: str, node: str, run: subprocess.Popen[bytes]) -> None:
    """Waits until a node is at work."""

    def at_work() -> bool:
        assert run.poll() is None, (prefect.folder / f"{name}.out").read_text()
        return bool(entries(store, name).get(node, {}).get("state") == "running")

    wait_for(at_work, 600, f"{node} at work")


def made(nodes: dict) -> list[tuple]:
    return [(name, e["key"], e["digest"]) for name, e in nodes.items()]


def test_two_hosts_that_each_die_make_what_one_makes(prefect, s3, smoke_store, record, tmp_path):
    store = f"{s3}/{tmp_path.name}"
    with contextlib.ExitStack() as stack:
        cpus = stack.enter_context(host(prefect, "cpus"))
        gpus = stack.enter_context(host(prefect, "gpus"))
        run = begun(prefect, store, "two")
        try:
            running(prefect, store, "two", "prepare", run)
            ends(cpus)
            stack.enter_context(host(prefect, "cpus"))
            running(prefect, store, "two", "round-001.update", run)
            ends(gpus)
            stack.enter_context(host(prefect, "gpus"))
            assert run.wait(1200) == 0, (prefect.folder / "two.out").read_text()
        finally:
            run.kill()
    found = Store(store).read_json("runs", "two", "run.json")
    assert found["status"] == "finished"
    assert made(found["nodes"]) == made(record(smoke_store, "first")["nodes"])
    # Policies went from host to host, and are gone, as requests are.
    assert Store(store).names("handed") == []
    out = (prefect.folder / "two.out").read_text()
    for pool in POOLS:
        assert out.count(f"a worker of pool {pool} is at work on") == 2, out
    assert "replaying" not in out.split("round-001.update")[0]
    audit = subprocess.run([RLHF, "audit", "--store", store, "two"], env=prefect.env, capture_output=True, text=True)
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_the_host_of_the_run_dies_and_the_same_command_goes_on_elsewhere(prefect, s3, smoke_store, record, tmp_path):
    store = f"{s3}/{tmp_path.name}"
    with host(prefect, "cpus"), host(prefect, "gpus") as gpus:
        run = begun(prefect, store, "moved")
        running(prefect, store, "moved", "sft", run)
        ends(psutil.Process(run.pid))
        since = time.monotonic()

        def left() -> bool:
            family = gpus.children(recursive=True)
            return not any("stages.worker.process" in " ".join(p.cmdline()) for p in family if p.is_running())

        wait_for(left, 90, "the worker to leave")
        assert time.monotonic() - since < 90
        elsewhere = os.environ | prefect.env | {"RLHF_SCRATCH": str(prefect.folder / "scratch-other")}
        done = subprocess.run(command(store, "moved"), env=elsewhere, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stdout + done.stderr
    assert made(entries(store, "moved")) == made(record(smoke_store, "first")["nodes"])

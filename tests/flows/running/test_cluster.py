"""Runs whose roles are actors of a real Ray cluster of three nodes on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlhf.flows.running.cluster import write_package
from rlhf.stages.store.artifacts import Store
from tests.flows.running.cluster_run import Run, sets
from tests.flows.running.ray_cluster import RayCluster, ray_cluster
from tests.support import until

pytestmark = pytest.mark.slow

TRAIN = ["workers.train={hosts: 2, resources: {train: 1}}"]
ROLES = [*TRAIN, "workers.sample={resources: {sample: 1}}", "workers.score={resources: {score: 1}}"]
FEW = ["rl.rounds=1", "data.source_args={transcripts: 28, skilled: 0.5, prompts: 14, heldout: 14}"]
"""Fewer rows: two processes with a model of 135 million parameters share two cores."""
LOCAL = ["workers.train={hosts: 2}", "workers.sample={}", "workers.score={}"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray")) as found:
        yield found


@pytest.fixture(autouse=True)
def no_run_is_left() -> Iterator[None]:
    yield
    for process in (run.process for run in Run.all if run.process.poll() is None):
        process.kill()
        process.wait()
    Run.all.clear()


def on(cluster: RayCluster, store: Path, *options: str, roles: list[str] = ROLES, recipe: str = "smoke") -> Run:
    return Run(
        store, "--cluster", cluster.address, *sets(roles), *options, recipe=recipe, environment=cluster.environment
    )


def workers() -> set[int]:
    """The processes of this session that run stages."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            own = process.environ().get("RLHF_SCRATCH") == os.environ["RLHF_SCRATCH"]
            if own and "rlhf.stages.worker.process" in process.cmdline():
                found.add(process.pid)
    return found


@pytest.mark.timeout(400)
def test_a_lost_node_is_named_and_the_run_resumes_with_the_artifacts_of_a_local_one(cluster, tmp_path):
    local = Run(tmp_path / "local", "--only", "sft", *sets(LOCAL[:1]))
    run = on(cluster, tmp_path / "store", "--only", "sft", roles=TRAIN)
    run.until("role train runs on node")
    cluster.command("remove two")
    run.until("role train waits for resources that the cluster does not have: 2 hosts with {CPU: 1, train: 1} each")
    assert "the node left the cluster; `ray start --address=" in run.text
    cluster.command("add two")
    assert "try 2 of" in run.ends()
    local.ends()
    assert run.nodes() == local.nodes()
    until(lambda: not workers(), 20, 0.5)
    log = Store(str(tmp_path / "store")).scratch / "runs" / "run" / "worker-train.log"
    assert "---- sft (sft " in log.read_text()


def test_resources_that_no_node_has_are_named_with_the_nodes(cluster, tmp_path):
    roles = ["workers.train={gpus: 2}", "workers.wait_seconds=3"]
    text = on(cluster, tmp_path / "store", "--only", "sft", roles=roles).ends(1)
    assert "role train needs {CPU: 1, GPU: 2}; nodes: " in text and "train: 1, two: 1}" in text
    assert "No such resources within 3 s (workers.wait_seconds)" in text


def test_a_node_that_would_compute_other_bits_is_refused_before_its_first_stage(cluster, tmp_path):
    environment = cluster.environment | {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    run = Run(tmp_path / "store", "--cluster", cluster.address, "--only", "sft", *sets(TRAIN), environment=environment)
    text = run.ends(1)
    assert (
        "of role train is refused: JAX_DEFAULT_MATMUL_PRECISION is not set there and highest on the run's host" in text
    )


def test_an_address_that_nobody_answers_is_refused_within_seconds(tmp_path):
    run = Run(tmp_path / "store", "--cluster", "127.0.0.1:9")
    assert "workers.cluster: no connection to Ray at 127.0.0.1:9 (ConnectionRefusedError" in run.ends(2, 60)


def test_workers_end_with_the_driver_of_their_run(cluster, tmp_path):
    run = on(cluster, tmp_path / "store", "--only", "sft", roles=TRAIN)
    run.until("role train runs on node")
    # The data's worker here, and two of the role.
    until(lambda: len(workers()) == 3, 60, 0.2)
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    until(lambda: not workers(), 60, 0.5)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe, more", [("smoke", ["rl.staleness=1"]), ("guess", FEW)])
def test_a_run_with_all_roles_on_a_cluster_makes_the_artifacts_of_a_local_one(cluster, tmp_path, recipe, more):
    local = Run(tmp_path / "local", *sets(LOCAL + more), recipe=recipe)
    local.ends(seconds=1600)
    run = on(cluster, tmp_path / "store", *sets(more), recipe=recipe)
    run.ends(seconds=1600)
    assert run.nodes() == local.nodes()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", ["round-000.rollout", "round-000.score", "round-000.update"])
def test_any_node_may_be_lost_in_any_stage(cluster, tmp_path, stage):
    run = on(cluster, tmp_path / "store")
    store = Store(str(tmp_path / "store"))

    def state() -> str | None:
        assert run.process.poll() is None, run.text
        nodes = (store.read_json("runs", "run", "run.json") or {"nodes": {}})["nodes"]
        return nodes.get(stage, {}).get("state")

    until(lambda: state() == "running", 400, 0.1)
    node = "two" if stage == "round-000.update" else "three"
    cluster.command(f"remove {node}")
    # JAX may end the other process of a group before Ray misses the node; the role then waits for another one.
    run.until(f"`ray start --address={cluster.address}` on", 240)
    cluster.command(f"add {node}")
    assert "try 2 of" in run.ends(seconds=600)


def test_code_that_travels_is_loaded_on_a_node_with_an_installed_project(tmp_path):
    package = tmp_path / "code.zip"
    write_package(package, tmp_path)
    installed = tmp_path / "installed" / "rlhf" / "stages"
    installed.mkdir(parents=True)
    for folder in (installed.parent, installed):
        (folder / "__init__.py").touch()
    environment = os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{tmp_path / 'installed'}"}
    script = "import rlhf.stages, rlhf.tuning.names; print(rlhf.stages.__file__, rlhf.tuning.names.__file__)"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert all(place.startswith(str(package)) for place in done.stdout.split()), done.stdout

"""A run that is a job of a real Slurm of two nodes ends, whatever cuts it off, as one that nothing has disturbed."""

import os
from pathlib import Path
from typing import Any

import pytest

from rlhf.flows.records import find_run, status_of
from rlhf.stages.store.artifacts import Store
from tests.infra.slurm import NODES, Slurm, why_not
from tests.support import with_devices

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.skipif(bool(why_not()), reason=why_not())]
THREADS = {"NPROC": "4", "PJRT_NPROC": "4"}
"""As many threads compute on each device, however many processes there are ."""
SECONDS = 900.0
"""In which a run of `smoke` ends on a busy machine."""


class Job:
    """A run of `smoke` as a job on one node with two devices."""

    def __init__(self, cluster: Slurm, store: Path, *options: str):
        self.cluster, self.store = cluster, store
        devices = with_devices(2, os.environ["XLA_FLAGS"])
        environment = {name: devices[name] for name in ("XLA_FLAGS", "JAX_PLATFORMS")} | THREADS
        self.number = cluster.submit(
            "slurm.sbatch", *options, environment=environment, RUN="run", RECIPE="smoke", STORE=str(store)
        )

    def until_it_is_at(self, node: str) -> None:
        self.cluster.until(lambda: self.state(node) == "running", f"{node} at work", SECONDS, self.number)

    def until_it_is_back(self) -> None:
        """In the queue again, or at work again."""
        back = f"job {self.number} in the queue again"
        self.cluster.until(lambda: self.cluster.job(self.number)["Restarts"] == "1", back, 120, self.number)

    def output(self) -> str:
        return self.cluster.output(self.number)

    def state(self, node: str) -> str:
        record = Store(str(self.store)).read_json("runs", "run", "run.json") or {"nodes": {}}
        return str(record["nodes"].get(node, {}).get("state", ""))

    def status(self) -> str:
        store = Store(str(self.store))
        return status_of(find_run(store, "run"), store)

    def ends(self, state: str) -> str:
        """Its output, once it has ended in this state."""
        return self.cluster.ends(self.number, state, SECONDS)

    def nodes(self) -> dict[str, tuple[str, str, Any]]:
        """Key, digest and loss of each node."""
        found = find_run(Store(str(self.store)), "run")["nodes"]
        return {name: (e["key"], e["digest"], e["metrics"].get("loss")) for name, e in found.items()}


def was_interrupted(output: str) -> bool:
    """Whether a first try was recorded as interrupted, for which the second one has not waited."""
    first, _, second = output.partition("run run continues (try 2)")
    return "interrupted; finished stages are kept" in first and second != "" and "waiting until" not in first


@pytest.fixture(scope="module")
def undisturbed(cluster: Slurm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, Any]]:
    job = Job(cluster, tmp_path_factory.mktemp("undisturbed") / "store")
    job.ends("COMPLETED")
    return job.nodes()


def test_a_run_that_its_time_cuts_off_goes_on_under_its_name(cluster, undisturbed, tmp_path) -> None:
    # A minute is the shortest; the signal comes when less than 55 s of it are left, of which Slurm looks each 30 s.
    job = Job(cluster, tmp_path / "store", "--time=1", "--signal=B:USR1@55")
    job.until_it_is_back()
    cluster.command("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    output = job.ends("COMPLETED")
    assert was_interrupted(output)
    assert len(undisturbed) == 17 and job.nodes() == undisturbed


def test_a_job_that_is_cancelled_is_recorded_as_interrupted_and_does_not_come_back(cluster, tmp_path) -> None:
    job = Job(cluster, tmp_path / "store")
    job.until_it_is_at("prepare")
    cluster.command("scancel", str(job.number))
    job.ends("CANCELLED")
    assert cluster.job(job.number)["Restarts"] == "0"
    assert job.status() == "interrupted"


def test_a_job_that_is_preempted_is_recorded_as_interrupted_and_comes_back(cluster, tmp_path) -> None:
    job = Job(cluster, tmp_path / "store")
    job.until_it_is_at("prepare")
    (cluster.project / "urgent.sh").write_text("#!/bin/sh\n")
    urgent = ["--partition=urgent", f"--nodes={len(NODES)}", "--gpus-per-node=8"]
    cluster.command("sbatch", "--wait", *urgent, "urgent.sh")
    cluster.until(lambda: "(try 2)" in job.output(), "the second try", SECONDS, job.number)
    cluster.command("scancel", str(job.number))
    assert was_interrupted(job.ends("CANCELLED"))


def test_after_the_loss_of_its_node_a_run_counts_as_killed_and_ends_on_another(cluster, undisturbed, tmp_path) -> None:
    """Ten minutes pass, in which nothing computes."""
    job = Job(cluster, tmp_path / "store")
    job.until_it_is_at("reward")
    lost = cluster.job(job.number)["BatchHost"]
    cluster.kill_node(lost)
    try:
        job.until_it_is_back()
        output = job.ends("COMPLETED")
        assert cluster.job(job.number)["BatchHost"] != lost
        assert f"on {lost}): waiting until it has ended, or has given no sign of life for 10 minutes" in output
        assert job.nodes() == undisturbed
    finally:
        cluster.start_node(lost)

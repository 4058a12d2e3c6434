"""Runs whose roles are actors of a real Ray cluster of three nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from stages.store.artifacts import Store
from tests.flows.running.ray_cluster import RayCluster, ray_cluster
from tests.support import RLHF

TRAIN = ["workers.train={hosts: 2, resources: {train: 1}}"]
ROLES = [*TRAIN, "workers.sample={resources: {sample: 1}}", "workers.score={resources: {score: 1}}"]
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


class Run:
    """A run as a process, and its lines as they come."""

    all: ClassVar[list[Run]] = []

    def __init__(self, store: Path, *options: str, recipe: str = "smoke", environment: dict[str, str] | None = None):
        command = [RLHF, "run", recipe, "--no-prefect", "--store", str(store), "--name", "run", *options]
        self.store, self.lines = store, list[str]()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment or dict(os.environ)
        )
        self.all.append(self)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def until(self, said: str, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while said not in self.text:
            assert time.monotonic() < end and self.process.poll() is None, self.text
            time.sleep(0.2)

    def ends(self, code: int = 0, seconds: float = 240) -> str:
        assert self.process.wait(seconds) == code, self.text
        self._reader.join(10)
        return self.text

    def nodes(self) -> dict[str, tuple[Any, ...]]:
        """Key, digest and state of each node."""
        record = Store(str(self.store)).read_json("runs", "run", "run.json")
        return {name: (e["key"], e.get("digest")) for name, e in record["nodes"].items()}


def sets(values: list[str]) -> list[str]:
    return [part for value in values for part in ("--set", value)]


def on(cluster: RayCluster, store: Path, *options: str, roles: list[str] = ROLES, recipe: str = "smoke") -> Run:
    return Run(
        store, "--cluster", cluster.address, *sets(roles), *options, recipe=recipe, environment=cluster.environment
    )


def workers() -> set[int]:
    """The processes of this machine that run stages."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "stages.worker.process" in process.cmdline():
                found.add(process.pid)
    return found


@pytest.mark.timeout(400)
def test_a_lost_node_is_named_and_the_run_resumes_with_the_artifacts_of_a_local_one(cluster, tmp_path):
    before = workers()
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
    assert workers() <= before

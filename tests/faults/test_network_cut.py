"""A node of a cluster whose network is cut: two nodes in network namespaces of their own, joined by a virtual cable."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.running.cluster_run import Run, sets

TRAIN = ["workers.train={hosts: 2, resources: {train: 1}}"]
LONGER = ["sft.epochs=6", "sft.checkpoint_every=1"]
PORT = 6379
RAY = str(Path(sys.executable).with_name("ray"))


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Network:
    """Two namespaces with a cable between them, in which Ray's nodes run."""

    def __init__(self, folder: Path):
        self.names = [f"rlhf{uuid.uuid4().hex[:6]}{i}" for i in range(2)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        # Ray's sockets lie below it: the path has to be short.
        self.folder, self.log = Path("/tmp") / f"r{uuid.uuid4().hex[:6]}", folder / "ray.log"
        self.environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "10",
            # Other tests of this process keep Ray on loopback.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        }
        self.nodes: list[subprocess.Popen[bytes] | None] = [None, None]

    def set_up(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", "v0", "netns", self.names[0], "type", "veth", "peer", "name", "v1", "netns", self.names[1])
        for i, name in enumerate(self.names):
            ip("-n", name, "addr", "add", f"{self.addresses[i]}/24", "dev", f"v{i}")
            for device in ("lo", f"v{i}"):
                ip("-n", name, "link", "set", device, "up")

    def inside(self, i: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[i]]

    def start(self, i: int) -> None:
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if i == 0 else [f"--address={self.address}"]
        folder = self.folder / f"{i}-{uuid.uuid4().hex[:4]}"
        folder.mkdir(parents=True)
        command = [RAY, "start", *where, "--block", f"--node-ip-address={self.addresses[i]}", "--num-cpus=2"]
        more = [f"--temp-dir={folder}", '--resources={"train": 1}', f"--object-store-memory={80 << 20}"]
        with self.log.open("ab") as out:
            self.nodes[i] = subprocess.Popen(
                [*self.inside(i), *command, *more], stdout=out, stderr=out, env=self.environment, start_new_session=True
            )

    @property
    def address(self) -> str:
        return f"{self.addresses[0]}:{PORT}"

    def cable(self, state: str) -> None:
        ip("-n", self.names[1], "link", "set", "v1", state)

    def close(self) -> None:
        for node in self.nodes:
            if node is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGTERM)
                node.wait()
        for name in self.names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    found = Network(tmp_path)
    try:
        found.set_up()
        found.start(0)
        found.start(1)
        yield found
    finally:
        found.close()


def wait_for_nodes(network: Network, count: int) -> None:
    status = [*network.inside(0), RAY, "status", f"--address={network.address}"]
    end = time.monotonic() + 120
    while True:
        found = subprocess.run(status, capture_output=True, text=True, env=network.environment)
        if f"0.0/{count}.0 train" in found.stdout:
            return
        assert time.monotonic() < end, found.stdout + found.stderr + network.log.read_text()
        time.sleep(1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_node_that_loses_its_network_costs_one_try_and_no_digest(network, tmp_path):
    local = Run(tmp_path / "local", "--only", "sft", *sets(["workers.train={hosts: 2}", *LONGER]))
    local.ends(seconds=600)
    wait_for_nodes(network, 2)
    run = Run(
        tmp_path / "store",
        *("--cluster", network.address, "--only", "sft", *sets([*TRAIN, *LONGER])),
        environment=network.environment,
        prefix=network.inside(0),
    )
    run.until("role train runs on node", 400)
    end = time.monotonic() + 120
    while not list((tmp_path / "store" / "work").glob("sft/*/checkpoints*/**/2")):
        assert run.process.poll() is None and time.monotonic() < end, run.text
        time.sleep(0.2)
    network.cable("down")
    # The node goes on computing, and writes to the folder that both share.
    run.until("`ray start --address=", 300)
    network.cable("up")
    network.start(1)
    text = run.ends(seconds=400)
    assert "try 2 of" in text
    assert run.nodes() == local.nodes()

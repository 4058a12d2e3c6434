"""A Ray cluster of this machine: a process that prints its address and reads commands, and ends with its input.

Each node has an own custom resource of its name. `remove NAME` kills a node, `add NAME` starts one.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NODES = {"one": {"train": 1, "one": 1}, "two": {"train": 1, "two": 1}, "three": {"sample": 1, "score": 1}}
TRIES = 3
SMALL = {"object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1"}


class RayCluster:
    """The test's side of the process."""

    def __init__(self, process: subprocess.Popen[str], address: str, environment: dict[str, str]):
        self.address, self.environment, self._process = address, environment, process

    def command(self, text: str) -> None:
        """Has the process remove or add a node, and waits for it."""
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == f"done {text}"


@contextlib.contextmanager
def ray_cluster(folder: Path) -> Iterator[RayCluster]:
    """Starts the nodes on the loopback address, with token authentication."""
    # Ray's sockets lie below it: the path has to be short.
    place = Path("/tmp") / f"r{uuid.uuid4().hex[:6]}"
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Else workers get what other processes of the machine leave.
        "RAY_worker_niceness": "0",
        "RAY_TMPDIR": str(place),
        # A lost node is noticed within seconds.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "10",
    }
    (place / "ray").mkdir(parents=True)
    try:
        # Ray gives a node 30 seconds to start, which a busy machine may exceed.
        for attempt in range(TRIES):
            with _process(folder / "ray.log", environment) as process:
                if address := process.stdout.readline().strip():
                    yield RayCluster(process, address, environment)
                    return
                assert attempt < TRIES - 1, (folder / "ray.log").read_text()
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _process(log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.flows.running.ray_cluster"]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True, env=environment
        )
    try:
        yield process
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """Serves a test until its end of the input is closed."""
    out, sys.stdout = sys.stdout, sys.stderr
    from ray.cluster_utils import Cluster

    head: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=SMALL | head)

    def add(name: str, wait: bool) -> Any:
        # In a common folder, a node that starts unpacks the code over that of another node's running workers.
        folder = f"{os.environ['RAY_TMPDIR']}/{name}"
        return cluster.add_node(wait=wait, num_cpus=2, resources=NODES[name], temp_dir=folder, **SMALL)

    nodes = {name: add(name, wait=False) for name in NODES}
    cluster.wait_for_nodes()
    print(cluster.address, file=out, flush=True)
    for line in sys.stdin:
        action, name = line.split()
        if action == "remove":
            cluster.remove_node(nodes.pop(name), allow_graceful=False)
        else:
            nodes[name] = add(name, wait=True)
        print(f"done {line.strip()}", file=out, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()

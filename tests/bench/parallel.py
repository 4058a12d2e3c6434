"""Episodes and reward calls of which one in twenty hangs and one in twenty crashes, on this machine and on three nodes.

`python -m tests.bench.parallel`: one JSON line for each work and executor; every result is compared with the expected.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

PROCESSES = 6
"""In all, on this machine as on the nodes."""
CALL_SECONDS, STEP_SECONDS = 0.5, 10.0
"""Deadlines. 64 episodes share the cores, so that a step that does nothing may take seconds on a busy machine."""


class Game:
    """Two turns; the seed decides whether the last one hangs or crashes."""

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        self.seed, self.turns = seed, 0
        return f"game {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        if self.turns == 2:
            fail(self.seed)
        return f"{self.seed}: {action}", 0.5, self.turns == 2, False, {}


def fail(number: int) -> None:
    """Hang or crash for one number in twenty each."""
    if number % 20 == 3:
        time.sleep(600)
    if number % 20 == 7:
        os._exit(3)


def length(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A reward that fails as the prompt says."""
    fail(int(prompts[0]))
    return [float(len(completions[0]))]


def episodes(count: int) -> list[Any]:
    """Rewards of the turns of each episode, or the kind of its fault."""
    from rlhf.tuning.agents.contract import Fault, Spec, Task
    from rlhf.tuning.agents.processes import Environments

    found: dict[Any, Any] = {}
    left = iter(range(count))
    with Environments(Spec("tests.bench.parallel:Game", step_seconds=STEP_SECONDS)) as environments:
        for key in itertools.islice(left, 64):
            environments.open(key, Task(key))
        while len(found) < count:
            for key, answer in environments.poll(60.0):
                if isinstance(answer, Fault) or answer.terminated:
                    found[key] = answer.kind if isinstance(answer, Fault) else answer.observation
                    environments.discard(key)
                    if (after := next(left, None)) is not None:
                        environments.open(after, Task(after))
                else:
                    environments.step(key, "on")
    return [found[key] for key in range(count)]


def calls(count: int) -> list[Any]:
    """The reward of each completion, or its failure."""
    from rlhf.tuning.rewards.processes import attempt
    from rlhf.tuning.rewards.samples import Sample

    samples = [Sample(str(number), "x" * (number % 50)) for number in range(count)]
    outcomes = attempt("tests.bench.parallel:length", {}, samples, seconds=CALL_SECONDS, workers=PROCESSES)
    return [o.failure or o.value for o in outcomes]


def expected(kind: str, count: int) -> list[Any]:
    """What both executors must give."""
    failures = {
        "episodes": ("timeout", "crash"),
        "calls": (f"timeout after {CALL_SECONDS:g} s", "the process ended: status 3"),
    }
    hung, crashed = failures[kind]
    good: Callable[[int], Any] = lambda n: f"{n}: on" if kind == "episodes" else float(n % 50)  # noqa: E731
    return [hung if n % 20 == 3 else crashed if n % 20 == 7 else good(n) for n in range(count)]


def measure(executor: str, counts: dict[str, int]) -> None:
    """Run both works and print a line for each."""
    for name, work in {"episodes": episodes, "calls": calls}.items():
        began = time.monotonic()
        found = work(counts[name])
        seconds = time.monotonic() - began
        pairs = zip(found, expected(name, counts[name]), strict=True)
        kinds = Counter("as_expected" if a == b else str(a) for a, b in pairs)
        line = {"work": name, "executor": executor, "count": len(found), **dict(kinds.most_common(5))}
        print(json.dumps(line | {"seconds": round(seconds, 1), "per_second": round(len(found) / seconds)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.parallel", description=__doc__)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--calls", type=int, default=20000)
    counts = vars(parser.parse_args())
    measure("local", counts)
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # loopback alone
    from ray.cluster_utils import Cluster

    node = {"num_cpus": PROCESSES // 3, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    cluster = Cluster(initialize_head=True, head_node_args={**node, "temp_dir": folder})
    try:
        for _ in range(2):
            cluster.add_node(**node)
        os.environ["RLHF_CLUSTER"] = cluster.address
        measure("three Ray nodes", counts)
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

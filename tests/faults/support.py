"""A run of `rlhf` that a test can watch and kill."""

import itertools
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
from safetensors.numpy import load_file

from rlhf.stages.store.artifacts import Artifact, Store
from tests.support import RLHF

# Many small shards and steps, so that there is a middle to be killed in. Weights are stored after the last round only.
SETTINGS = {
    "sft.checkpoint_every": 1,
    "rl.rounds": 2,
    "rl.checkpoint_every": 2,
    "rl.rollout.prompts": 16,
    "rl.rollout.shard_prompts": 1,
    "rl.score.shard_completions": 4,
    "rl.update.prompts_per_step": 1,
    "evaluate": "null",
}


class Run:
    """`rlhf run` as a process group of its own, with its output in a file."""

    def __init__(
        self,
        store: Path,
        name: str,
        retries: int = 0,
        sets: dict[str, Any] = SETTINGS,
        folder: Path | None = None,
        recipe: str = "smoke",
        **more: Any,
    ):
        self.store, self.name = store, name
        self.log = store.with_name(f"{store.name}-{name}.log")
        sets = [f"{k}={v}" for k, v in (sets | {"store": store, "retries": retries} | more).items()]
        command = [RLHF, "run", recipe, "--no-prefect", "--name", name]
        command += [word for item in sets for word in ("--set", item)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=folder)

    def record(self) -> dict[str, Any]:
        return Store(str(self.store)).read_json("runs", self.name, "run.json") or {"nodes": {}}

    def state(self, node: str) -> str:
        return self.record()["nodes"].get(node, {}).get("state", "")

    def until(self, reached: Callable[[], bool], seconds: float = 120) -> None:
        """Waits for a moment of the run."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert self.process.poll() is None, f"the run ended too early:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.002)

    def family(self) -> list[psutil.Process]:
        """The worker and what it has started."""
        (worker,) = [
            c for c in psutil.Process(self.process.pid).children() if "rlhf.stages.worker.process" in c.cmdline()
        ]
        return [worker, *worker.children(recursive=True)]

    def worker(self) -> psutil.Process:
        """The worker, as soon as there is one: found before the moment to kill it comes."""
        children = psutil.Process(self.process.pid).children
        self.until(lambda: any("rlhf.stages.worker.process" in child.cmdline() for child in children()))
        return self.family()[0]

    def kill_worker(self, worker: psutil.Process | None = None) -> int:
        worker = worker or self.family()[0]
        # Stopped at once: while what it has started is looked for, it does nothing more.
        worker.suspend()
        others = worker.children(recursive=True)
        worker.kill()
        # What it had started (reward functions) must not live on without it.
        _, alive = psutil.wait_procs(others, timeout=10)
        assert alive == []
        return worker.pid

    def ends(self, code: int, seconds: float = 180) -> str:
        """Its output, once it has ended with this status."""
        found = self.process.wait(timeout=seconds)
        assert found == code, self.log.read_text()
        return self.log.read_text()


def shards(store: Path, stage: str, name: str) -> int:
    """How many shards a stage has finished and not yet committed."""
    return len(list((store / "work" / stage).glob(f"*/.sealed/{name}-*")))


def first_difference(one: Run, other: Run) -> list[str]:
    """Of the first node with other content in another run: its files that differ, and where; empty where none does."""
    of_other = other.record()["nodes"]
    for name, entry in one.record()["nodes"].items():
        beside = of_other.get(name)
        if beside is None or beside["key"] != entry["key"]:
            return [f"{name}: has another key, or is not there"]
        if beside["digest"] != entry["digest"]:
            found = [Store(str(run.store)).get(entry["stage"], entry["key"]) for run in (one, other)]
            assert found[0] is not None and found[1] is not None
            return [f"{name}: {line}" for line in differing(found[0], found[1])]
    return []


def differing(one: Artifact, other: Artifact) -> list[str]:
    """The files of which two artifacts have other bytes, with the tensors or columns that differ."""
    sums = [{f["path"]: f["sha256"] for f in artifact.manifest["files"]} for artifact in (one, other)]
    found = []
    for path in sorted(sums[0].keys() | sums[1].keys()):
        if path.startswith("logs/") or sums[0].get(path) == sums[1].get(path):
            continue
        if not (path in sums[0] and path in sums[1]):
            found.append(f"{path}: in one alone")
            continue
        found += [f"{path}: {line}" for line in _where(one.local(path), other.local(path))] or [path]
    return found


def _where(one: Path, other: Path) -> list[str]:
    if one.suffix == ".safetensors":
        tensors = load_file(one), load_file(other)
        pairs = [(name, tensors[0][name], tensors[1][name]) for name in tensors[0]]
        # By bytes: zeros of two signs are other content.
        return [
            f"{name} {a.shape}: {np.count_nonzero(a.view(np.uint8) != b.view(np.uint8))} bytes, "
            f"by {np.abs(a - b).max()} at most"
            for name, a, b in pairs
            if a.tobytes() != b.tobytes()
        ]
    if one.suffix == ".parquet":
        columns = pq.read_table(one).to_pydict(), pq.read_table(other).to_pydict()
        rows = {
            name: [i for i, pair in enumerate(itertools.zip_longest(v, columns[1][name])) if pair[0] != pair[1]]
            for name, v in columns[0].items()
        }
        return [f"{name}: {len(at)} rows, first {at[0]}" for name, at in rows.items() if at]
    return []

"""A run of `rlhf` that a test can watch and kill."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from rlhf.stages.store.artifacts import Store
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

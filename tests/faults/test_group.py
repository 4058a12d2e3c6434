"""A process group makes the artifacts of one process on the same mesh, also after it loses a process in any stage."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.support import Run
from tests.support import with_devices

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SETTINGS = {"rl.rounds": 2, "rl.checkpoint_every": 2, "evaluate": "null", "sft.checkpoint_every": 1}
GUESS = """
name: guess
base: {source: "random:tiny"}
data: {source: guess, source_args: {transcripts: 14, prompts: 7, heldout: 7}}
environment: {name: guess, turns: 3, max_tokens: 200}
sft: null
rl:
  rounds: 2
  rollout: {prompts: 4, completions: 4, max_tokens: 6}
  update: {prompts_per_step: 4}
evaluate: null
export: {name: guess}
"""


@pytest.fixture
def use(monkeypatch) -> Callable[[int], None]:
    """Sets the devices of each process."""
    flags = os.environ["XLA_FLAGS"]

    def set_up(devices: int) -> None:
        # As many threads compute each sum, whichever process it is of.
        for name, value in (with_devices(devices, flags) | {"NPROC": "4", "PJRT_NPROC": "4"}).items():
            monkeypatch.setenv(name, value)

    return set_up


def nodes(run: Run) -> dict[str, tuple[str, str, Any]]:
    """Key, digest and loss of each node."""
    found = run.record()["nodes"]
    return {name: (e["key"], e["digest"], e["metrics"].get("loss")) for name, e in found.items()}


def ended(store: Path, hosts: int = 1, **options: Any) -> Run:
    run = Run(store, "whole", **{"workers.train.hosts": hosts}, **options)
    run.ends(0, seconds=1500)
    return run


def processes(run: Run) -> list[psutil.Process]:
    """The processes of the group, process 0 first."""
    children = psutil.Process(run.process.pid).children()
    found = [c for c in children if "rlhf.stages.worker.process" in c.cmdline()]
    return sorted(found, key=lambda process: process.environ().get("JAX_PROCESS_ID", ""))


@pytest.mark.parametrize("recipe", ["smoke", "guess"])
def test_two_processes_make_the_artifacts_of_one_with_two_devices(use, tmp_path, recipe) -> None:
    named = recipe
    if recipe == "guess":
        (tmp_path / "guess.yaml").write_text(GUESS)
        named = str(tmp_path / "guess.yaml")
    use(2)
    alone = ended(tmp_path / "alone", sets={}, recipe=named)
    use(1)
    group = ended(tmp_path / "group", hosts=2, sets={}, recipe=named)
    assert nodes(group) == nodes(alone)


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_is_killed_in_any_stage_is_named_and_costs_no_digest(use, tmp_path, number) -> None:
    use(1)
    undisturbed = nodes(ended(tmp_path / "undisturbed", hosts=2, sets=SETTINGS))
    stages = ["sft", "reward", "round-000.rollout", "round-000.score", "round-001.update", "export"]
    run = Run(tmp_path / "store", "hit", retries=len(stages), sets=SETTINGS, **{"workers.train.hosts": 2})
    hit = 0
    for node in stages:
        run.until(lambda node=node: run.state(node) == "running", seconds=600)
        run.until(lambda: len(processes(run)) == 2, seconds=300)
        # In its middle, or before it: a stage is short once its programs are compiled.
        time.sleep(0.5)
        if run.state(node) != "running":
            continue
        own = processes(run)
        os.kill(own[number].pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(own, timeout=60)
        assert alive == []
        hit += 1
    log = run.ends(0, seconds=900)
    assert nodes(run) == undisturbed
    assert log.count(f"process {number} of 2 (pid") == hit > 0


def test_when_the_flow_is_killed_no_process_is_left(use, tmp_path) -> None:
    use(1)
    run = Run(tmp_path / "store", "orphans", sets=SETTINGS, **{"workers.train.hosts": 2})
    run.until(lambda: run.state("sft") == "running", seconds=300)
    family = psutil.Process(run.process.pid).children(recursive=True)
    assert len(family) >= 2
    run.process.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []

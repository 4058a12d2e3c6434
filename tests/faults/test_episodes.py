"""Environments that hang, crash and are slow among 256 episodes; kill -9 in their midst."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rlhf.stages.common.journal import read_lines
from rlhf.stages.sampling.environment import Environment
from rlhf.tuning.agents.rows import TrajectoryRow
from rlhf.tuning.rows import CompletionRow
from tests.stages.training.support import Folder, data, ids, perform, rows

pytestmark = pytest.mark.slow

TASKS = 256
HOSTILE = Environment(
    name="tests.stages.sampling.games:Hostile",
    turns=2,
    max_tokens=200,
    processes=256,
    step_seconds=3.0,
    max_failed_fraction=0.11,
)
FAILING = {number for number in range(TASKS) if number % 20 in (3, 7)}


def play(folder: Path, name: str, environment: Environment):
    """One episode of each task with a random model."""
    from rlhf.stages import base, rollout
    from rlhf.stages.common.compilation import configure_jax

    configure_jax()
    memory: dict = {}
    if not (folder / "base").exists():
        perform(base, base.Config(source="random:tiny"), folder / "base", memory)
        tasks = [
            {"id": f"t{i}", "prompt_ids": ids("play", end=False), "prompt": "play", "metadata": json.dumps({"seed": i})}
            for i in range(TASKS)
        ]
        data(folder / "data", prompts=tasks)
    model = Folder(folder / "base" / "out", "base")
    config = rollout.Config(prompts=TASKS, completions=1, max_tokens=3, environment=environment, order_seed=1)
    (out := folder / name / "out").exists() and out.rename(folder / name / f"out-{time.monotonic_ns()}")
    inputs = {"data": Folder(folder / "data", "data"), "policy": model, "tokenizer": model}
    return perform(rollout, config, folder / name, memory, **inputs)


def by_task(folder: Folder) -> dict[str, CompletionRow]:
    """Rows by task, without what differs by rounding."""
    table = {row.prompt_id: row for row in rows(folder, "rollouts", CompletionRow)}
    return {
        name: dataclasses.replace(row, logprobs=[math.isfinite(p) for p in row.logprobs]) for name, row in table.items()
    }


def test_what_hangs_crashes_or_is_slow_costs_itself_alone(tmp_path):
    metrics, plain = play(tmp_path, "plain", HOSTILE.model_copy(update={"arguments": {"harmless": True}}))
    assert metrics["statuses"] == {"done": TASKS}
    started = time.monotonic()
    metrics, hostile = play(tmp_path, "hostile", HOSTILE)
    seconds = time.monotonic() - started
    # Two tries of 3 s, all side by side, and the time of a machine at half speed: not one after another.
    assert seconds < 60, f"13 hanging episodes took {seconds:.0f} s"
    episodes = {e.prompt_id: e for e in rows(hostile, "trajectories", TrajectoryRow)}
    assert len(episodes) == TASKS
    assert {name for name, e in episodes.items() if e.status == "failed"} == {f"t{i}" for i in FAILING}
    assert Counter(e.status for e in episodes.values()) == {"failed": len(FAILING), "done": TASKS - len(FAILING)}
    assert all(e.reward is None and e.tries == 2 and e.reason for e in episodes.values() if e.status == "failed")
    found, expected = by_task(hostile), by_task(plain)
    same = [name for name in expected if int(name[1:]) not in FAILING]
    assert [name for name in same if found[name] != expected[name]] == []


PROGRAM = """
import sys
from pathlib import Path
from tests.faults.test_episodes import HOSTILE, play

play(Path(sys.argv[1]), "killed", HOSTILE.model_copy(update={"arguments": {"log": sys.argv[2]}, "processes": 16}))
"""


def test_after_a_kill_no_finished_episode_is_played_twice(tmp_path):
    log = tmp_path / "finished"
    play(tmp_path, "plain", HOSTILE.model_copy(update={"arguments": {"harmless": True}}))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(log)]
    child = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    while not log.exists() or len(log.read_text().splitlines()) < 60:
        assert child.poll() is None, "ended before it was killed"
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    journal = tmp_path / "killed" / "work" / "episodes.jsonl"
    finished = {place for place, _, _ in read_lines(journal)}
    assert finished
    before = Counter(log.read_text().split())
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    after = Counter(log.read_text().split())
    assert after.keys() == {str(i) for i in range(TASKS)} - {str(i) for i in FAILING}
    done = Folder(tmp_path / "killed" / "out", "killed")
    seeds = {e.place: str(e.seed) for e in rows(done, "trajectories", TrajectoryRow)}
    assert [seed for seed in (seeds[place] for place in finished) if after[seed] != before[seed]] == []
    assert max(after.values()) <= 2
    expected = by_task(Folder(tmp_path / "plain" / "out", "plain"))
    found = by_task(done)
    assert [name for name in expected if int(name[1:]) not in FAILING and found[name] != expected[name]] == []

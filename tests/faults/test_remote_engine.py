"""Rounds of RL with a server that the stage starts: it and the worker are killed, and no completion is lost."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from rlhf.stages.common.tables import read_rows
from rlhf.stages.store.artifacts import Store
from tests.faults.support import Run, shards
from tests.stages.sampling.http_server import VERSION

SETTINGS = {
    "sft.epochs": 1,
    "rl.rounds": 2,
    "rl.rollout.prompts": 24,
    "rl.rollout.shard_prompts": 2,
    "rl.score.rewards.model": "{function: matches, weight: 0.1, arguments: {pattern: x}}",
    "rl.rollout.engine.kind": "vllm",
    "rl.rollout.engine.version": VERSION,
    "rl.rollout.engine.dtype": "float32",
    "rl.rollout.engine.tolerance": 0.001,
    "rl.rollout.engine.sleep": "true",
    "rl.rollout.engine.command": f"{sys.executable} -m tests.stages.sampling.http_server",
    "reward": "null",
    "evaluate": "null",
    "export": "null",
}


def pids(folder: Path) -> list[int]:
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.mark.slow
def test_servers_and_worker_are_killed_and_every_completion_is_there(tmp_path):
    store = tmp_path / "store"
    sets = SETTINGS | {"rl.rollout.engine.arguments": f"[--pids, {tmp_path / 'pids'}]"}
    first = Run(store, "first", sets=sets)
    first.until(lambda: shards(store, "rollout", "rollouts") >= 2, seconds=900)
    (server,) = pids(tmp_path)
    os.kill(server, signal.SIGKILL)
    first.until(lambda: shards(store, "rollout", "rollouts") >= 6, seconds=900)
    assert len(pids(tmp_path)) == 2
    # The server that replaced it ends with the worker (asserted there).
    first.kill_worker()
    output = first.ends(1)
    assert "its prompts go to the next free server" in output
    assert not any(psutil.pid_exists(p) for p in pids(tmp_path))

    second = Run(store, "second", sets=sets)
    output = second.ends(0, seconds=1200)
    assert "of 12 shards of rollouts were there" in output
    # Both rounds' policies went to one server, which slept in between.
    assert output.count("has policy") == 2
    assert len(pids(tmp_path)) == 3
    assert not any(psutil.pid_exists(p) for p in pids(tmp_path))
    assert list((store / "engines").iterdir()) == []
    place, nodes = Store(str(store)), second.record()["nodes"]
    for number, policy in enumerate(("sft", "round-000.update")):
        entry = nodes[f"round-{number:03d}.rollout"]
        artifact = place.get(entry["stage"], entry["key"])
        rows = read_rows(artifact, "rollouts/")
        assert sorted((r["place"], r["sample"]) for r in rows) == [(p, s) for p in range(24) for s in range(4)]
        assert {r["policy"] for r in rows} == {nodes[policy]["digest"]}
        assert artifact.manifest["config"]["engine"]["version"] == VERSION
    # The trainer finds the log-probabilities that the server recorded to be its own.
    metrics = nodes["round-000.update"]["metrics"]
    assert metrics["mismatch_kl"] < 1e-6

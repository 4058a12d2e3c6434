"""A run whose store is a bucket: the same bits as on a disk, and another machine goes on where one died."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlhf.stages.common.tables import read_rows
from rlhf.stages.store.artifacts import Store
from tests.faults.support import Run, shards
from tests.stages.sampling.http_server import VERSION
from tests.support import RLHF

# Sections that are left out would leave out their splits too, and the data would be other bits.
SPLITS = "data.splits=[sft, preference, prompts, heldout]"
SECTIONS = [SPLITS, "reward=null", "rl=null", "evaluate=null", "sft.checkpoint_every=1"]


def start(url: str, name: str, scratch: Path) -> subprocess.Popen[str]:
    sets = [w for item in [f"store={url}", "retries=0", *SECTIONS] for w in ("--set", item)]
    command = [RLHF, "run", "smoke", "--no-prefect", "--name", name, *sets]
    env = os.environ | {"RLHF_SCRATCH": str(scratch)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


@pytest.mark.slow
def test_another_machine_goes_on_from_the_bucket(s3, tmp_path, smoke_store, record):
    url = f"{s3}/{tmp_path.name}"
    store = Store(url)
    first = start(url, "first", tmp_path / "one-machine")
    mirrored: list[str] = []
    while not mirrored and first.poll() is None:
        time.sleep(0.05)
        mirrored = [p for p in store.fs.find(store.join("work", "sft")) if "/.mirrored/checkpoints/" in p]
    (worker,) = [c for c in psutil.Process(first.pid).children() if "rlhf.stages.worker.process" in c.cmdline()]
    worker.kill()
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 1, out
    assert "in stage sft" in out

    second = start(url, "second", tmp_path / "another-machine")
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0, out
    assert "sft: resumed at step" in out
    made = record(url, "second")["nodes"]
    assert {n: e["state"] for n, e in made.items()} == {
        "base": "hit",
        "prepare": "hit",
        "sft": "made",
        "export": "made",
    }
    disk = record(smoke_store, "first")["nodes"]
    nodes = ("base", "prepare", "sft")
    assert {n: made[n]["digest"] for n in nodes} == {n: disk[n]["digest"] for n in nodes}
    assert store.fs.find(store.join("work")) == []
    assert store.fs.find(store.join("leases")) == []
    assert all(store.verify(a) is None for a in (store.get(*key) for key in store.all_keys()) if a is not None)


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
    first.until(lambda: shards(store, "rollout", "rollouts") >= 2)
    (server,) = pids(tmp_path)
    os.kill(server, signal.SIGKILL)
    first.until(lambda: shards(store, "rollout", "rollouts") >= 6)
    assert len(pids(tmp_path)) == 2
    # The server that replaced it ends with the worker (asserted there).
    first.kill_worker()
    output = first.ends(1)
    assert "its prompts go to the next free server" in output
    assert not any(psutil.pid_exists(p) for p in pids(tmp_path))

    second = Run(store, "second", sets=sets)
    output = second.ends(0)
    assert "of 12 shards of rollouts were there" in output
    # Both rounds' policies went to one server.
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

"""A run whose store is a bucket: the same bits as on a disk, and another machine goes on where one died."""

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from rlhf.stages.store.artifacts import Store
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

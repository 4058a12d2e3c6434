"""kill -9 during checkpoints of SFT at ten random moments: it always goes on and ends with the same weights."""

import hashlib
import random
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow

KILLS = 10
# The SFT stage on artifacts of a store, with a checkpoint after each step.
PROGRAM = """
import sys
from pathlib import Path
from rlhf.stages import sft
from rlhf.stages.common.compilation import configure_jax
from rlhf.stages.common.settings import Optimizer
from rlhf.stages.store.artifacts import Store
from tests.stages.support import context

def say(*words):
    print(*words, flush=True)

configure_jax()
url, base, data, folder = sys.argv[1:]
base, data = Store(url).get("base", base), Store(url).get("prepare", data)
config = sft.Config(epochs=2, examples_per_step=16, checkpoint_every=1, optimizer=Optimizer(learning_rate=1e-3))
given = {"inputs": {"base": base, "data": data, "tokenizer": base}, "seed": 5, "log": say}
given["progress"] = lambda done, *_, **metrics: say("step", done)
sft.run(context(config, Path(folder, "out"), Path(folder, "work"), **given))
"""


def start(arguments):
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def weights(folder):
    return hashlib.sha256((folder / "out" / "model" / "model.safetensors").read_bytes()).hexdigest()


def test_ten_kills_change_no_bit(smoke_store, record, tmp_path):
    nodes = record(smoke_store, "first")["nodes"]
    keys = smoke_store, nodes["base"]["key"], nodes["prepare"]["key"]
    undisturbed = start([*keys, tmp_path / "whole"])
    out, _ = undisturbed.communicate(timeout=120)
    assert undisturbed.returncode == 0, out
    steps = out.count("step ")
    assert steps >= KILLS

    rng = random.Random(0)
    resumed_at, killed = [], 0
    while killed < KILLS:
        process = start([*keys, tmp_path / "killed"])
        for line in process.stdout:
            if line.startswith("resumed"):
                resumed_at.append(int(line.split()[3]))
            if line.startswith("step"):
                # The step is computed and its checkpoint begins; a save takes some tens of milliseconds.
                time.sleep(rng.uniform(0, 0.08))
                process.kill()
                killed += 1
                break
        process.wait()
        process.stdout.close()
        assert process.returncode == -9
        if resumed_at and resumed_at[-1] >= steps - 2:
            break
    last = start([*keys, tmp_path / "killed"])
    out, _ = last.communicate(timeout=120)
    assert last.returncode == 0, out
    assert resumed_at == sorted(resumed_at) and killed >= min(KILLS, steps - 2)
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")

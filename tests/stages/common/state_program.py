"""A process of a group that trains, saves and restores; run by `test_state`, which reads the JSON of its last line.

Usage: state_program.py STORE SCRATCH DATA,FSDP,TENSOR train|end
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

from rlhf.tuning import multihost

if multihost.in_group():
    multihost.initialize(60)

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.transfers import files_of
from rlhf.stages.store.work import WorkFolder, is_chunk
from rlhf.tuning.axes import Axes
from rlhf.tuning.mesh import init_state, make_mesh, put_params, state_shapes
from rlhf.tuning.models.huggingface import load_decoder, save_decoder
from rlhf.tuning.models.identity import fingerprint
from rlhf.tuning.settings import OptimizerSettings
from rlhf.tuning.training.checkpoint import Checkpoints, load_tree, save_tree
from rlhf.tuning.training.optimizers import optimizer_of
from rlhf.tuning.training.step import make_step
from tests.tuning.tiny import CONFIG, PARAMS

KEY = "k" * 64
OPTIMIZER = optimizer_of(OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, max_skipped=2))


def pull(params, batch, frozen):
    return sum(jnp.sum(jnp.sin(3 * x) * batch["weight"]) for x in jax.tree.leaves(params)), {}


def values(tree):
    """A digest of whole values: the judge of restores, which shares no code with `fingerprint`."""
    h = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        h.update(np.ascontiguousarray(multihost.to_host(leaf)).tobytes())
    return h.hexdigest()


def peak():
    return next(int(x.split()[1]) for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))


url, scratch, axes, what = sys.argv[1:]
store = Store(url, scratch=Path(scratch) / str(multihost.process_index()))
mesh = make_mesh(Axes(*map(int, axes.split(","))))
folder = WorkFolder(store, "sft", KEY)
work = folder.open()
checkpoints = Checkpoints(work / "checkpoints", folder.save, folder.fetch)
like = state_shapes(OPTIMIZER, PARAMS, mesh)
restored = checkpoints.restore(like)
found = {"bytes": sum(p.stat().st_size for p in work.rglob("*") if p.is_file() and is_chunk(p.as_posix()))}
if restored is None:
    params, first = put_params(PARAMS, mesh), 0
    state = params, init_state(OPTIMIZER, params, mesh)
else:
    state, position = restored
    first = position["step"]
if what == "train":
    step_fn = make_step(pull, OPTIMIZER, 2, mesh)
    for step in range(first, first + 2):
        state = step_fn(*state, [{"weight": np.float32(1 + step)}])[:2]
        # What differs by process does not reach the others.
        checkpoints.save(step + 1, state, {"step": step + 1, "process": multihost.process_index()})
    checkpoints.wait()
    found |= {"written": checkpoints.bytes_written}
found |= {"first": first, "values": values(state), "fingerprint": fingerprint(state[0]), "peak": peak()}
if what == "train":
    print(json.dumps(found), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
checkpoints.close()
out = work / "out"
save_tree(out / "state" / "trainer", state[1])
save_decoder(out / "model", CONFIG, state[0], {})
artifact = store.commit(out, {"stage": "sft", "key": KEY, "metrics": {}}, files=files_of(out))
trainer = load_tree(artifact.local("state/", lambda path: not is_chunk(path)) / "trainer", like[1], artifact.fetch)
found |= {
    "digest": artifact.digest,
    "verified": store.verify(artifact),
    "position": position,
    "kept": values(trainer) == values(state[1]),
    "model": fingerprint(load_decoder(artifact.local("model/"), mesh)[1]),
}
folder.drop()
print(json.dumps(found), flush=True)

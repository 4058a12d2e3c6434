"""Trains a few steps on meshes of this program's devices and prints what it found; run by `test_mesh`.

Usage: mesh_program.py FOLDER [PROCESS COUNT PORT]
"""

import json
import sys
from pathlib import Path

import jax

if len(sys.argv) > 2:
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[4]}", num_processes=int(sys.argv[3]), process_id=int(sys.argv[2]))

import jax.numpy as jnp
import numpy as np

from rlhf.tuning.axes import Axes
from rlhf.tuning.device import Compute
from rlhf.tuning.mesh import gather, init_state, make_mesh, put_params, row_shards
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.identity import fingerprint
from rlhf.tuning.models.lora import LoraConfig, tune
from rlhf.tuning.settings import OptimizerSettings
from rlhf.tuning.training.batch import Layout, micro_batches
from rlhf.tuning.training.checkpoint import Checkpoints
from rlhf.tuning.training.forward import logps_and_entropy
from rlhf.tuning.training.optimizers import optimizer_of
from rlhf.tuning.training.step import copy, make_step
from tests.tuning.models import support as adapters
from tests.tuning.tiny import CONFIG, PARAMS, ragged_groups

GRAPH = decoder_graph(CONFIG)
MESHES = [(4, Axes(2, 1, 2)), (8, Axes(2, 2, 2))]


def loss_fn(params, batch, frozen):
    logps, _ = logps_and_entropy(GRAPH, params, batch, 1.0, Compute())
    return -jnp.sum(logps) / batch["n_tokens"], {"tokens": jnp.sum(batch["mask_CT"])}


def batches(shards):
    groups = ragged_groups(7, count=24)
    n = np.float32(sum(len(c) for g in groups for c in g.completions))
    packed = micro_batches(groups, layout=Layout(64, 64), completion_tokens=8, shards=shards)
    return [p.arrays() | {"n_tokens": n} for p in packed]


def optimizer():
    return optimizer_of(OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, max_skipped=2))


class Run:
    """A model in training on a mesh."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.params = copy(PARAMS) if mesh is None else put_params(PARAMS, mesh)
        self.state = init_state(optimizer(), self.params, mesh)
        self.step = make_step(loss_fn, optimizer(), 2, mesh)

    def train(self, steps):
        losses = []
        for _ in range(steps):
            self.params, self.state, sums = self.step(self.params, self.state, batches(row_shards(self.mesh)))
            losses.append(sums["loss"])
        return losses


def other_rules(name):
    """Steps of another optimizer on a mesh and without one: the largest gap, and whether moments lie as parameters."""
    rule = optimizer_of(OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, max_skipped=2, name=name))

    def pull(params, batch, frozen):
        return sum(jnp.sum(jnp.sin(3 * x) * batch["weight"]) for x in jax.tree.leaves(params)), {}

    found = []
    for mesh in (None, make_mesh(Axes(1, 2, 2), jax.devices()[:4])):
        params = copy(PARAMS) if mesh is None else put_params(PARAMS, mesh)
        state, step = init_state(rule, params, mesh), make_step(pull, rule, 2, mesh)
        for weight in (1.0, 0.5):
            params, state, _ = step(params, state, [{"weight": np.float32(weight)}])
        found.append(params)
    gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), *found)
    names = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}
    beside = []
    for path, moment in jax.tree_util.tree_leaves_with_path(state):
        mine = [x for name, x in names.items() if jax.tree_util.keystr(path).endswith(name) and x.shape == moment.shape]
        beside += [moment.sharding.spec == mine[0].sharding.spec] if mine else []
    return {"gap": max(jax.tree.leaves(gaps)), "beside": beside}


def adapter(kind):
    """Gradient of an adapter over quantised kernels on a mesh and without one: the largest gap, and the first device's
    part of the codes."""
    lora = LoraConfig(rank=4, quantize=kind)
    trainable, frozen = tune(CONFIG, "decoder", adapters.PARAMS, lora, seed=1)
    trainable = adapters.moved(trainable)
    mesh = make_mesh(Axes(2, 2, 2))
    held = put_params(frozen, mesh)
    one = adapters.gradient(lora, trainable, frozen)
    other = adapters.gradient(lora, put_params(trainable, mesh), held)
    gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), one, other)
    codes = [x for p, x in jax.tree_util.tree_leaves_with_path(held) if "codes" in jax.tree_util.keystr(p)]
    share = sum(x.addressable_shards[0].data.size for x in codes) / sum(x.size for x in codes)
    return {"gap": max(jax.tree.leaves(gaps)), "share": share}


def several_processes():
    run = Run(make_mesh(Axes(1, 2, 2)))
    losses = run.train(3)
    return {"losses": losses, "fingerprint": fingerprint(gather(run.params)), "devices": jax.device_count()}


def one_process(folder):
    found = {"plain": Run(None).train(3)}
    checkpoints = Checkpoints(folder / "c")
    for count, axes in MESHES:
        run = Run(make_mesh(axes, jax.devices()[:count]))
        run.train(3)
        if count == 4:
            checkpoints.save(3, (run.params, run.state), {"step": 3})
            checkpoints.wait()
            saved = jax.tree.map(np.asarray, (run.params, run.state))
            found["fourth"] = run.train(1)
    kernel = run.params["layers"]["gate"]["kernel"][...]
    found["share"] = kernel.addressable_shards[0].data.size / kernel.size
    (run.params, run.state), _ = checkpoints.restore((run.params, run.state))
    checkpoints.close()
    restored = jax.tree.leaves((run.params, run.state))
    found["restored"] = all(np.array_equal(a, b) for a, b in zip(restored, jax.tree.leaves(saved), strict=True))
    found["restored_on"] = len(restored[0].sharding.device_set)
    found["resumed"] = run.train(1)
    found["adapters"] = {kind: adapter(kind) for kind in ("int8", "nf4")}
    found["rules"] = {name: other_rules(name) for name in ("adafactor", "muon")}
    return found


print(json.dumps(several_processes() if len(sys.argv) > 2 else one_process(Path(sys.argv[1]))))

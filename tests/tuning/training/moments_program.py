"""Moments on a mesh of this program's devices, for `test_moments`: digests and places, as JSON."""

import hashlib
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.axes import Axes
from rlhf.tuning.device import HOST_MEMORY
from rlhf.tuning.mesh import init_state, make_mesh, own_params, state_shapes
from rlhf.tuning.training.checkpoint import load_tree, save_tree
from rlhf.tuning.training.optimizers import optimizer_of
from tests.tuning.training.descent import settings

RNG = np.random.default_rng(0)
WEIGHTS = {
    "embedding": jnp.asarray(RNG.normal(size=(64, 32)), jnp.float32),
    "layers": {"q": {"kernel": jnp.asarray(RNG.normal(size=(2, 32, 64)), jnp.float32)}},
}
MESH = make_mesh(Axes())


def updated(moments, mesh):
    """The optimizer, and its state after two updates; each element counts for itself alone."""
    optimizer = optimizer_of(settings("adamw", moments=moments))
    params = own_params(WEIGHTS, mesh)
    state = init_state(optimizer, params, mesh)
    places = jax.tree.map(lambda x: x.sharding, state)
    for _ in range(2):
        _, state = jax.jit(optimizer.update, out_shardings=(None, places))(params, state, params)
    return optimizer, state


def digest(state):
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state))).hexdigest()


optimizer, state = updated("host", MESH)
held = [x for x in jax.tree.leaves(state) if x.shape == WEIGHTS["embedding"].shape]
with tempfile.TemporaryDirectory() as folder:
    save_tree(Path(folder) / "state", state)
    again = load_tree(Path(folder) / "state", state_shapes(optimizer, WEIGHTS, MESH)[1])
same = digest(again) == digest(state)
same = same and all(a.sharding == b.sharding for a, b in zip(*map(jax.tree.leaves, (again, state)), strict=True))
print(
    json.dumps(
        {
            "one": digest(updated("bfloat16", None)[1]),
            "four": digest(updated("bfloat16", MESH)[1]),
            "on_host": all(x.sharding.memory_kind == HOST_MEMORY for x in held),
            "share": held[0].addressable_shards[0].data.size / held[0].size,
            "restored": same,
        }
    )
)

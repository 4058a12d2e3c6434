"""A mixture on meshes of this program's devices and without one; run by `test_experts`."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.axes import Axes
from rlhf.tuning.device import Compute
from rlhf.tuning.mesh import make_mesh, put_batch, put_params, row_shards, under
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.huggingface import load_decoder, random_params, save_decoder
from rlhf.tuning.precision import use
from rlhf.tuning.training.batch import Layout, micro_batches
from rlhf.tuning.training.forward import logps_entropy_and_router
from tests.tuning.models.mixtures import MIXTURE
from tests.tuning.tiny import ragged_groups

MESHES = {"fsdp": Axes(1, 4, 1), "data fsdp tensor": Axes(2, 2, 2), "fsdp tensor context": Axes(1, 2, 2, 2)}
use("float64")
CONFIG = dataclasses.replace(MIXTURE, normalise_experts=False)
BIASED = {"paired_experts": True, "mlp_bias": True, "router_bias": True, "activation": "clamped_swiglu", "sinks": True}


def params_of(config):
    def one(path, x):
        noise = 0.1 * jax.random.normal(jax.random.key(len(str(path))), x.shape)
        return 4 * x if x.ndim > 2 and "bias" not in str(path) else x + noise

    return jax.tree_util.tree_map_with_path(one, random_params(config, 3))


GROUPS = ragged_groups(7, count=12)


def loss(config, params, batch):
    logps, entropy, (aux, sums) = logps_entropy_and_router(
        decoder_graph(config), params, batch, 1.0, Compute("float64", remat="full")
    )
    return jnp.sum(logps) + 0.1 * jnp.sum(entropy) + aux, sums


def found(config, mesh, params):
    (batch,) = micro_batches(GROUPS, layout=Layout(64, 8), completion_tokens=8, shards=row_shards(mesh))
    with under(mesh):
        program = jax.jit(jax.value_and_grad(functools.partial(loss, config), has_aux=True))
        return program(params, put_batch(batch.arrays(), mesh))


gaps = {}
for kind, config in {"plain": CONFIG, "biased": dataclasses.replace(CONFIG, **BIASED)}.items():
    params = params_of(config)
    wanted = found(config, None, params)
    for name, axes in MESHES.items():
        mesh = make_mesh(axes, jax.devices()[: axes.data * axes.fsdp * axes.tensor * axes.context])
        both = zip(*map(jax.tree.leaves, (found(config, mesh, put_params(params, mesh)), wanted)), strict=True)
        gaps[f"{kind} {name}"] = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in both)
PARAMS = params_of(CONFIG)
with tempfile.TemporaryDirectory() as folder:
    save_decoder(Path(folder), CONFIG, PARAMS, {}, dtype="float64")
    mesh = make_mesh(Axes(1, 2, 2), jax.devices()[:4])
    _, loaded = load_decoder(Path(folder), mesh)
same = all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (loaded, PARAMS)), strict=True))
kernel = loaded["layers"]["gate"]["kernel"][...]
share = kernel.addressable_shards[0].data.size / kernel.size
print(json.dumps({"gaps": gaps, "loaded": same, "share": share}))

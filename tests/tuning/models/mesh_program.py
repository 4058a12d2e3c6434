"""Attention on meshes of this program's devices and without one: the largest gaps; run by `test_attention`."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rlhf.tuning.axes import Axes
from rlhf.tuning.compile_target import compiling_for
from rlhf.tuning.mesh import make_mesh, under
from rlhf.tuning.models import attention as att
from rlhf.tuning.models import sharding
from rlhf.tuning.models.decoder import AttentionSpec
from tests.tuning.models.rows import LENGTH, alone, packed

MESHES = {
    "rows": Axes(2, 1, 1),
    "heads": Axes(1, 2, 2),
    "copies": Axes(1, 2, 4),
    "whole": Axes(1, 1, 3),
    "columns": Axes(1, 1, 2, 3),
    "few columns": Axes(1, 2, 1, 4),
}
"""`copies`: two key-value heads over four devices. `whole`: neither rows nor heads divide. `few columns`: less than a
block of queries, so splash is not asked."""


def loss(implementation, group, branch, spec):
    attention = att.packed_attention(group, branch, implementation)
    weight = jax.random.normal(jax.random.key(1), (2, LENGTH, 4, 16))

    def of(arrays):
        q, k, v, *sinks = arrays
        own = dataclasses.replace(spec, sinks_N=sinks[0] if sinks else None)
        return jnp.sum(jnp.where((group > 0)[..., None, None], attention(q, k, v, own, None)[0] * weight, 0))

    return of


def gap(implementation, rows, axes, window, by_layer, sinks=()):
    def arrays():
        keys = jax.random.split(jax.random.key(0), 3)
        return [*(jax.random.normal(k, (2, LENGTH, n, 16)) for k, n in zip(keys, (4, 2, 2), strict=True)), *sinks]

    group, branch, positions = rows
    spec = AttentionSpec(0.3, 3.0, jnp.int32(window) if by_layer else window, positions, by_layer)
    program = jax.jit(jax.value_and_grad(loss(implementation, group, branch, spec)))
    expected = program(arrays())
    sizes = axes.data * axes.fsdp * axes.tensor * axes.context
    mesh = make_mesh(axes, jax.devices()[:sizes])
    with under(mesh):
        found = program(jax.device_put(arrays(), NamedSharding(mesh, PartitionSpec())))
    return max(float(np.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True))


def gap_of_groups():
    """A sum that each device keeps its part of, in groups of two as a TPU would have them of eight."""
    x = jax.random.normal(jax.random.key(2), (8, 16, 3))
    sharding.LARGEST_GROUP = 2

    def parts():
        local = jax.shard_map(
            lambda x: sharding.scattered_sum(x[0], "fsdp", 0), mesh=make_mesh(Axes(1, 8, 1)),
            in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec("fsdp"), check_vma=False,
        )  # fmt: skip
        return jax.jit(local)(x)

    with compiling_for("tpu"):
        return float(np.abs(parts() - x.sum(axis=0)).max())


gaps = {}
for name, axes in MESHES.items():
    for implementation in ("plain", "blocked"):
        gaps[f"{name} {implementation}"] = gap(implementation, packed(), axes, 20, None)
    if name != "few columns":
        gaps[f"{name} splash"] = gap("splash", alone(), axes, None, None)
gaps["windows by layer, blocked"] = gap("blocked", packed(), MESHES["heads"], 20, 20)
gaps["windows by layer, splash"] = gap("splash", alone(), MESHES["heads"], 20, 20)
gaps["shared prompts, splash"] = gap("splash", packed(), MESHES["heads"], None, None)
gaps["windows by layer, columns, blocked"] = gap("blocked", packed(), MESHES["columns"], 20, 20)
gaps["windows by layer, columns, splash"] = gap("splash", alone(), MESHES["columns"], 20, 20)
gaps["shared prompts, columns, splash"] = gap("splash", packed(), MESHES["columns"], None, None)
gaps["copies, triton"] = gap("triton", packed(), MESHES["copies"], 20, None)
gaps["columns, triton"] = gap("triton", alone(), MESHES["columns"], None, None)
gaps["windows by layer, columns, triton"] = gap("triton", packed(), MESHES["columns"], 20, 20)
gaps["a sum in groups"] = gap_of_groups()
for implementation, rows in {"plain": packed(), "blocked": packed(), "triton": packed(), "splash": alone()}.items():
    sinks = [jnp.arange(4.0)]
    gaps[f"sinks, {implementation}"] = gap(implementation, rows, MESHES["copies"], 20, None, sinks)
print(json.dumps(gaps))

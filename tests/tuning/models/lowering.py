"""A training pass as text for a TPU."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from rlhf.tuning.compile_target import compiling_for
from rlhf.tuning.models import attention as att
from rlhf.tuning.models.decoder import abstract_decoder


def lowered_for_tpu(mesh, length, config):
    """The text of a training pass for a TPU of these devices, without a compiler for it."""
    graph, shapes = abstract_decoder(config)

    def on(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on()), shapes)
    ints = jax.ShapeDtypeStruct((8, length), jnp.int32, sharding=on(("data", "fsdp")))

    def loss(params, tokens, group, positions):
        attention = att.packed_attention(group, None)
        return nnx.merge(graph, params)(tokens, positions, attention, dtype=jnp.bfloat16)[0].astype(jnp.float32).sum()

    with compiling_for("tpu"), jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.grad(loss)).trace(params, ints, ints, ints)
        return traced.lower(lowering_platforms=("tpu",)).as_text()

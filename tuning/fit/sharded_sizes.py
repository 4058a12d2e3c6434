"""Shapes of models and of trained parameters, and their bytes on one device."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from rlhf.tuning.device import HOST_MEMORY
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import abstract_decoder
from rlhf.tuning.models.huggingface import scalar_head_shapes
from rlhf.tuning.models.lora import LoraConfig, Role, trainable_shapes, tune
from rlhf.tuning.models.tensors import narrowed
from rlhf.tuning.precision import real


def size(tree: Any) -> int:
    """Bytes of a tree of shapes in the memory of one device: the part that the sharding of each gives it, the whole
    without one, and 0 of those in the host's memory."""
    total = 0
    for x in jax.tree.leaves(tree):
        place = getattr(x, "sharding", None)
        if place is None or place.memory_kind != HOST_MEMORY:
            total += math.prod(x.shape if place is None else place.shard_shape(x.shape)) * x.dtype.itemsize
    return total


def on_all(tree: Any, mesh: Any) -> Any:
    """Shapes of arrays that each device of the mesh has whole."""
    where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def shapes_of(config: DecoderConfig, role: Role) -> Any:
    """Shapes of all parameters."""
    return abstract_decoder(config)[1] if role == "decoder" else scalar_head_shapes(config)


def trees(config: DecoderConfig, role: Role, lora: LoraConfig | None, dtype: str) -> tuple[Any, Any]:
    """Return (shapes of trained parameters, shapes of the frozen ones under them or None)."""
    dense = shapes_of(config, role)
    if lora is None:
        return dense, None
    frozen = jax.eval_shape(lambda p: tune(config, role, p, lora, seed=0, dtype=dtype)[1], dense)
    return trainable_shapes(config, role, lora), frozen


def frozen(config: DecoderConfig, role: Role, dtype: str) -> Any:
    """Shapes of parameters that are only read, as `rlhf.stages.common.models.load_frozen` has them: matrices in the
    type of computation, if that is smaller."""
    shapes = shapes_of(config, role)
    smaller = jnp.dtype(dtype).itemsize < real().itemsize
    return jax.eval_shape(lambda params: narrowed(params, dtype), shapes) if smaller else shapes

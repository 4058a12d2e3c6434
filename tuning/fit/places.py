"""Shapes of models and of what is trained, and their bytes on one device."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tuning.device import HOST_MEMORY
from tuning.mesh import laid_out
from tuning.models.config import DecoderConfig
from tuning.models.decoder import abstract_decoder
from tuning.models.huggingface import scalar_head_shapes
from tuning.models.lora import LoraConfig, Role, trainable_shapes, tune
from tuning.precision import real


def size(tree: Any) -> int:
    """Bytes of a tree of shapes in the memory of one device: the part that the sharding of each gives it, the whole
    without one, and 0 of those in the host's memory."""
    total = 0
    for x in jax.tree.leaves(tree):
        place = getattr(x, "sharding", None)
        if place is None or place.memory_kind != HOST_MEMORY:
            total += math.prod(x.shape if place is None else place.shard_shape(x.shape)) * x.dtype.itemsize
    return total


def weights(config: DecoderConfig, mesh: Any, dtype: str | None = None) -> int:
    """Bytes of a decoder on one device of the mesh, with matrices in `dtype`."""
    return size(laid_out(in_type(shapes_of(config, "decoder"), dtype), mesh))


def on_all(tree: Any, mesh: Any) -> Any:
    """Shapes of arrays that each device of the mesh has whole."""
    where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def narrower(dtype: str) -> str | None:
    """The type where it is smaller than that of weights, as `stages.common.models.load_frozen` has it."""
    return dtype if jnp.dtype(dtype).itemsize < real().itemsize else None


def shapes_of(config: DecoderConfig, role: Role) -> Any:
    """Shapes of all parameters."""
    return abstract_decoder(config)[1] if role == "decoder" else scalar_head_shapes(config)


def trees(config: DecoderConfig, role: Role, lora: LoraConfig | None, dtype: str) -> tuple[Any, Any]:
    """(shapes of what is trained, shapes of what is frozen under it or None)."""
    dense = shapes_of(config, role)
    if lora is None:
        return dense, None
    frozen = jax.eval_shape(lambda p: tune(config, role, p, lora, seed=0, dtype=dtype)[1], dense)
    return trainable_shapes(config, role, lora), frozen


def in_type(shapes: Any, dtype: str | None) -> Any:
    """Shapes with their matrices in `dtype`; unchanged for None."""
    if dtype is None:
        return shapes
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype if len(x.shape) > 1 else x.dtype), shapes)

"""Where the arrays of a program are on devices that are not here: bytes of each, and the program of one device."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from tuning.axes import Axes
from tuning.device import HOST_MEMORY
from tuning.fit.liveness import Size, nbytes
from tuning.mesh import axis_sizes, state_shardings
from tuning.models.config import DecoderConfig
from tuning.models.decoder import abstract_decoder
from tuning.models.huggingface import scalar_head_shapes
from tuning.models.lora import LoraConfig, Role, trainable_shapes, tune
from tuning.models.sharding import shardings
from tuning.precision import real
from tuning.settings import OptimizerSettings
from tuning.training.moments import owners
from tuning.training.optimizers import optimizer_of


@dataclasses.dataclass(frozen=True)
class Beside:
    """A model that is in the devices' memory while a program that does not read it runs."""

    name: str
    """What it is, for the table."""
    model: DecoderConfig
    role: Role = "decoder"
    frozen: bool = False
    """Whether its matrices are in the type of computation, where that is smaller."""
    optimizer: OptimizerSettings | None = None
    """Its moments in place of its weights."""
    lora: LoraConfig | None = None
    """The moments are those of such an adapter, and the adapter is with them."""
    axes: Axes | None = None
    """Of the mesh that it is on, where that is not the program's."""


def narrower(dtype: str) -> str | None:
    """The type where it is smaller than that of weights, as `stages.common.models.load_frozen` has it."""
    return dtype if jnp.dtype(dtype).itemsize < real().itemsize else None


def of_others(others: Iterable[Beside], mesh: Any, dtype: str) -> dict[str, int]:
    """Bytes on one device of each, by name; `dtype` is the type of computation."""
    parts: dict[str, int] = {}
    for other in others:
        shapes = shapes_of(other.model, other.role)
        place = mesh if other.axes is None else abstract_mesh(other.axes, mesh.size)
        if other.optimizer is not None:
            own = shapes if other.lora is None else trees(other.model, other.role, other.lora, dtype)[0]
            size = state_bytes(optimizer_of(other.optimizer), own, place)
            size += weight_bytes(own, place) if other.lora is not None else 0
        else:
            size = weight_bytes(in_type(shapes, narrower(dtype) if other.frozen else None), place)
        parts[other.name] = parts.get(other.name, 0) + size
    return parts


def abstract_mesh(axes: Axes, count: int) -> AbstractMesh:
    """The mesh of so many devices. Raises ValueError where the axes do not multiply to that."""
    sizes = axis_sizes(axes, count)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def bytes_of(tree: Any, places: Any = None) -> int:
    """Bytes of a tree of shapes on one device; `places`: a sharding for each, None for all of it.

    What is in the host's memory counts for nothing.
    """
    if places is None:
        return sum(int(nbytes(x)) for x in jax.tree.leaves(tree))
    return sum(
        math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize
        for x, s in zip(jax.tree.leaves(tree), jax.tree.leaves(places), strict=True)
        if s.memory_kind != HOST_MEMORY
    )


def weight_bytes(tree: Any, mesh: Any) -> int:
    """Bytes of parameters on one device, by the rules of `models.sharding`."""
    return bytes_of(tree, shardings(tree, mesh))


def state_bytes(optimizer: Any, params: Any, mesh: Any) -> int:
    """Bytes of an optimizer's state in the memory of one device."""
    return bytes_of(jax.eval_shape(optimizer.init, params), state_shardings(optimizer, params, mesh)[1])


def on_host_bytes(optimizer: Any, params: Any, mesh: Any) -> tuple[int, int]:
    """Bytes of a device's part of the moments in the host's memory: of all parameters, and of the one with most."""
    state, places = jax.eval_shape(optimizer.init, params), state_shardings(optimizer, params, mesh)[1]
    sizes: dict[Any, int] = collections.Counter()
    for x, s, own in zip(*map(jax.tree.leaves, (state, places, owners(state, params))), strict=True):
        if s.memory_kind == HOST_MEMORY:
            sizes[own.path] += math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(sizes.values()), max(sizes.values(), default=0)


def local(config: DecoderConfig, tensor: int) -> DecoderConfig:
    """The model as one of `tensor` devices computes it; what they do not divide evenly it has whole."""

    def part(size: int) -> int:
        return size // tensor if size % tensor == 0 else size

    heads = part(config.num_heads)
    # Devices of one key-value head each have a copy of it.
    kv_heads = (
        config.num_kv_heads // tensor if config.num_kv_heads % tensor == 0 else math.gcd(config.num_kv_heads, heads)
    )
    return dataclasses.replace(
        config,
        num_heads=heads,
        num_kv_heads=min(kv_heads, max(1, heads)) if heads != config.num_heads else config.num_kv_heads,
        intermediate_size=part(config.intermediate_size),
        vocab_size=part(config.vocab_size),
    )


def shapes_of(config: DecoderConfig, role: Role) -> Any:
    """Shapes of all parameters."""
    if role == "decoder":
        return abstract_decoder(config)[1]
    return scalar_head_shapes(config)


def trees(config: DecoderConfig, role: Role, lora: LoraConfig | None, dtype: str) -> tuple[Any, Any]:
    """(shapes of what is trained, shapes of what is frozen under it or None)."""
    dense = shapes_of(config, role)
    if lora is None:
        return dense, None
    frozen = jax.eval_shape(lambda p: tune(config, role, p, lora, seed=0, dtype=dtype)[1], dense)
    return trainable_shapes(config, role, lora), frozen


def sizes_over(shapes: Any, fsdp: int) -> Size:
    """Bytes of a value of the program of one device, where arrays with the shape of a parameter in `shapes` are cut
    over `fsdp` devices."""
    cut = {x.shape for x in jax.tree.leaves(shapes) if len(x.shape) > 1}

    def size(aval: Any, whole: bool) -> float:
        return nbytes(aval) / (fsdp if not whole and getattr(aval, "shape", None) in cut else 1)

    return size


def in_type(shapes: Any, dtype: str | None) -> Any:
    """Shapes with their matrices in `dtype`; unchanged for None."""
    if dtype is None:
        return shapes
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype if len(x.shape) > 1 else x.dtype), shapes)

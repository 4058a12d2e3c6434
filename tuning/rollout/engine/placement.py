"""How an engine's weights and caches are sharded over its mesh: heads over `tensor`, slots over the other axes."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tuning.axes import Axes
from tuning.mesh import axis_sizes, make_mesh
from tuning.models.sharding import shardings


def sampling_mesh(axes: Any, devices: list[Any] | None = None) -> Mesh | None:
    """The mesh of this process's devices that the axes of training give an engine; None for a single one.

    Parameters that training shards over `fsdp` are replicated here, and each replica has a part of the slots: sampling
    holds no optimizer state, and gathering weights for every token would cost more than replicas do.
    """
    devices = jax.local_devices() if devices is None else devices
    if len(devices) == 1:
        return None
    return make_mesh(sampling_axes(axes, len(devices)), devices)


def sampling_axes(axes: Any, count: int) -> Axes:
    """The axes of `sampling_mesh` over `count` devices. Raises ValueError where they do not multiply to that."""
    sizes = axis_sizes(Axes(axes.data, axes.fsdp, axes.tensor, axes.context), count)
    # A token is decoded behind a cache that one replica holds: there is no length to cut.
    return Axes(sizes["data"] * sizes["fsdp"] * sizes.get("context", 1), 1, sizes["tensor"])


def put_weights(state: nnx.State, mesh: Mesh | None) -> nnx.State:
    """Weights moved to the mesh by the model's rules; unchanged without a mesh."""
    return state if mesh is None else jax.device_put(state, shardings(state, mesh))


def put_cache(cache: list[dict[str, jax.Array]], mesh: Mesh | None) -> list[dict[str, jax.Array]]:
    """Caches moved to the mesh by `cache_shardings`; unchanged without a mesh."""
    return cache if mesh is None else jax.device_put(cache, cache_shardings(cache, mesh))


def cache_shardings(cache: Any, mesh: Mesh) -> Any:
    """A sharding for each array of the caches; slots or heads that an axis does not divide evenly are not sharded over
    it."""

    def one(x: jax.Array) -> NamedSharding:
        rows = tuple(a for a in ("data", "fsdp") if mesh.shape.get(a, 1) > 1)
        across = 1
        for axis in rows:
            across *= mesh.shape[axis]
        heads = mesh.shape.get("tensor", 1)
        _, slots, kv_heads, *_ = x.shape
        spec = (None, rows if rows and slots % across == 0 else None, "tensor" if kv_heads % heads == 0 else None)
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(one, cache)

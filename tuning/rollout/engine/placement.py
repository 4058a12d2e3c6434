"""Where an engine's weights and caches lie on a mesh of its own: heads over `tensor`, slots over the other axes."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tuning.axes import Axes
from tuning.mesh import make_mesh
from tuning.models.sharding import shardings


def sampling_mesh(axes: Any, devices: list[Any] | None = None) -> Mesh | None:
    """The mesh of this process's devices that `data`, `fsdp` and `tensor` give an engine; None for a single one.

    Sampling has no optimizer to hold, and to gather weights anew for each token would cost more than copies of them:
    what training cuts by `fsdp` are replicas here, each with its part of the slots.
    """
    devices = jax.local_devices() if devices is None else devices
    if len(devices) == 1:
        return None
    sizes = make_mesh(Axes(axes.data, axes.fsdp, axes.tensor), devices).shape
    return make_mesh(Axes(sizes["data"] * sizes["fsdp"], 1, sizes["tensor"]), devices)


def put_weights(state: Any, mesh: Mesh | None) -> Any:
    """Weights on the mesh by the model's rules, from wherever they lie; without one they stay."""
    return state if mesh is None else jax.device_put(state, shardings(state, mesh))


def put_cache(cache: list[dict[str, jax.Array]], mesh: Mesh | None) -> list[dict[str, jax.Array]]:
    """Caches on the mesh; an axis that does not divide slots or heads evenly does not cut them."""
    if mesh is None:
        return cache

    def one(x: jax.Array) -> jax.Array:
        rows = tuple(a for a in ("data", "fsdp") if mesh.shape.get(a, 1) > 1)
        across = 1
        for axis in rows:
            across *= mesh.shape[axis]
        heads = mesh.shape.get("tensor", 1)
        _, slots, kv_heads, *_ = x.shape
        spec = (None, rows if rows and slots % across == 0 else None, "tensor" if kv_heads % heads == 0 else None)
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(one, cache)

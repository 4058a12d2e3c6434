"""Where engines are: a replica of the weights on each device, or heads and features of one divided over `tensor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf.tuning.axes import Axes
from rlhf.tuning.device import memory_bytes
from rlhf.tuning.mesh import axis_sizes, make_mesh
from rlhf.tuning.models.sharding import shardings

Place: TypeAlias = Mesh | jax.Device | None
"""The devices of an engine: a mesh with the axis `tensor` only, a device, or (None) JAX's default device."""


def sampling_mesh(axes: Any, devices: list[Any] | None = None) -> Mesh | None:
    """The mesh of all devices that the axes of training give engines; None for a single one.

    Parameters that training shards over `fsdp` are replicated here, and each replica has its own engine: sampling
    holds no optimizer state, and gathering weights for every token would cost more than replicas do.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) == 1:
        return None
    return make_mesh(sampling_axes(axes, len(devices)), devices)


def sampling_axes(axes: Any, count: int) -> Axes:
    """The axes of `sampling_mesh` over `count` devices. Raises ValueError if their product is another number."""
    sizes = axis_sizes(Axes(axes.data, axes.fsdp, axes.tensor, axes.context), count)
    # One replica holds the cache of a sequence: there is no axis `context`.
    return Axes(sizes["data"] * sizes["fsdp"] * sizes.get("context", 1), 1, sizes["tensor"])


def replicas_of(mesh: Mesh | None) -> int:
    """How many engines a mesh of `sampling_mesh` has."""
    return 1 if mesh is None else len(places_of(mesh))


def places_of(mesh: Mesh) -> list[Place]:
    """The place of each replica of a mesh."""
    rows = mesh.devices.reshape(-1, mesh.shape.get("tensor", 1))
    return [row[0] if len(row) == 1 else Mesh(row.reshape(1, 1, -1), ("data", "fsdp", "tensor")) for row in rows]


def own_places(mesh: Mesh) -> list[Place]:
    """The places of `places_of` on the devices of this process.

    Raises ValueError if one is on devices of several processes: one process drives an engine.
    """
    found = []
    for place in places_of(mesh):
        devices = place.devices.flat if isinstance(place, Mesh) else [place]
        owners = {device.process_index for device in devices if device is not None}
        if len(owners) > 1:
            raise ValueError(
                f"mesh.tensor {mesh.shape['tensor']} puts one engine on the devices of processes {sorted(owners)}: "
                "lower it to a divisor of the devices of one process"
            )
        if owners == {jax.process_index()}:
            found.append(place)
    return found


def put_weights(state: nnx.State, mesh: Mesh | None) -> nnx.State:
    """Weights moved to the mesh by the model's rules; unchanged without a mesh."""
    return state if mesh is None else _moved(state, shardings(state, mesh))


def part_of(state: nnx.State, place: Place) -> nnx.State:
    """A replica's own weights, of those that `put_weights` has moved to the mesh of all replicas. Nothing is copied."""

    def one(x: jax.Array) -> jax.Array:
        parts = {shard.device: shard.data for shard in x.addressable_shards}
        if isinstance(place, jax.Device):
            return parts[place]
        assert isinstance(place, Mesh) and isinstance(x.sharding, NamedSharding)
        mine = [parts[device] for device in place.devices.flat]
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(place, x.sharding.spec), mine)

    return jax.tree.map(one, state)


def make_at(place: Place, make: Callable[[], Any]) -> Any:
    """The empty caches that `make` returns, allocated on the devices of the place alone."""
    if place is None:
        return make()
    shapes = jax.eval_shape(make)
    if isinstance(place, Mesh):
        return jax.tree.map(_zeros, shapes, cache_shardings(shapes, place))
    return jax.tree.map(lambda x: _zeros(x, place), shapes)


def _zeros(x: Any, where: Any) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype, device=where)


def put_cache(cache: list[dict[str, jax.Array]], place: Place) -> list[dict[str, jax.Array]]:
    """Caches of a place as `cache_shardings` divides them; unchanged without a mesh."""
    return _moved(cache, cache_shardings(cache, place)) if isinstance(place, Mesh) else cache


def cache_shardings(cache: Any, mesh: Mesh) -> Any:
    """A sharding for each array of the caches; heads that `tensor` does not divide evenly are not sharded."""

    def one(name: str, x: Any) -> NamedSharding:
        axis = 0 if name.startswith("by_head") else 2
        # Experts of tokens have no heads.
        heads = "tensor" if x.shape[axis] % mesh.shape["tensor"] == 0 and name != "experts" else None
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, heads))

    return [{name: one(name, x) for name, x in stack.items()} for stack in cache]


def free_bytes(place: Place) -> int | None:
    """Free bytes on the fullest device of a place; None if devices do not report them, as CPUs."""
    if isinstance(place, Mesh):
        devices = list(place.devices.flat)
    else:
        devices = [jax.local_devices()[0] if place is None else place]
    stats = [device.memory_stats() for device in devices]
    return min(memory_bytes() - int(one["bytes_in_use"]) for one in stats) if all(stats) else None


def _moved(tree: Any, where: Any) -> Any:
    """The arrays in these shardings. Moved between devices alone if both are over the same devices in the same order:
    `device_put` would take an array that is divided another way through the host."""

    def one(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        if x.sharding.is_equivalent_to(sharding, x.ndim) or _devices(x.sharding) != _devices(sharding):
            return jax.device_put(x, sharding)
        return jax.jit(lambda y: y, out_shardings=sharding)(x)

    return jax.tree.map(one, tree, where)


def _devices(sharding: Any) -> list[Any]:
    mesh = getattr(sharding, "mesh", None)
    return list(mesh.devices.flat) if isinstance(mesh, Mesh) else list(sharding.device_set)

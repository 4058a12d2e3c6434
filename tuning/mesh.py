"""Several devices, of one process or of several: the mesh, and how arrays are sharded over it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from rlhf.tuning import multihost
from rlhf.tuning.axes import Axes
from rlhf.tuning.device import HOST_MEMORY
from rlhf.tuning.models.sharding import CONTEXT, ROWS, shardings


def make_mesh(axes: Axes, devices: list[Any] | None = None) -> Mesh:
    """A mesh over `devices` (by default those of all processes), `tensor` innermost.

    Raises ValueError where the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes(axes, len(devices))
    # Innermost means neighbours: `tensor` communicates in every layer and needs the fastest links.
    return Mesh(_by_links(devices, tuple(sizes.values())), tuple(sizes))


def axis_sizes(axes: Axes, count: int) -> dict[str, int]:
    """The size of each axis over `count` devices, outermost first; `context` is among them only where rows are cut.

    Raises ValueError where they do not multiply to that.
    """
    sizes = {"data": axes.data, "fsdp": axes.fsdp, CONTEXT: axes.context, "tensor": axes.tensor}
    if axes.context == 1:
        del sizes[CONTEXT]
    known = math.prod(s for s in sizes.values() if s > 0)
    open_axes = [name for name, s in sizes.items() if s == -1]
    if len(open_axes) > 1:
        raise ValueError(f"mesh {sizes}: one size may be -1")
    if open_axes:
        # Rounded down; a remainder is reported by the check below.
        sizes[open_axes[0]] = max(1, count // known)
    if math.prod(sizes.values()) != count:
        raise ValueError(f"mesh {sizes} asks for {math.prod(sizes.values())} devices, there are {count}")
    return sizes


def _by_links(devices: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    """The devices in this shape; on TPU so that neighbours along an axis share a link, as rings of sums need."""
    if len(devices) == 1 or devices[0].platform != "tpu" or len({getattr(d, "slice_index", 0) for d in devices}) > 1:
        return np.array(devices).reshape(shape)
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def over_devices(axes: Axes) -> Mesh | None:
    """The mesh of all devices, those of this process where it is alone (`multihost.alone`); None for a single one."""
    devices = jax.devices() if multihost.process_count() == jax.process_count() else jax.local_devices()
    return None if len(devices) == 1 else make_mesh(axes, devices)


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that a tree of arrays is on; None for a single device."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def under(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Within it programs are traced for this mesh: kernels use `shard_map` (`models.attention`)."""
    return nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def row_shards(mesh: Mesh | AbstractMesh | None) -> int:
    """Shards of a batch; its rows and its completions are multiples of this."""
    return 1 if mesh is None else math.prod(mesh.shape[a] for a in ROWS)


def put(value: Any, sharding: NamedSharding) -> jax.Array:
    """A copy of an array on its devices. Every process holds the whole value and hands over its own part."""
    if isinstance(value, jax.Array) and value.is_fully_addressable == sharding.is_fully_addressable:
        # A shard may share memory with its source, and donating the shard would invalidate the source.
        return jax.device_put(jnp.copy(value), sharding)
    host = multihost.to_host(value)
    # device_put reaches local devices only; here each process contributes the shards that it can address.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index].copy())


def put_params(params: Any, mesh: Mesh | None) -> Any:
    """Parameters, adapters or frozen trees on the mesh by the rules of `models.sharding`.

    Arrays that already have their sharding are returned as they are.
    """
    return params if mesh is None else _lay(params, shardings(params, mesh))


def laid_out(shapes: Any, mesh: Mesh | None) -> Any:
    """Shapes of parameters, each with its place on the mesh, to restore into."""
    return shapes if mesh is None else _shapes_at(shapes, shardings(shapes, mesh))


def _shapes_at(shapes: Any, places: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, places)


def own_params(params: Any, mesh: Mesh | None) -> Any:
    """A copy of parameters, on the mesh where there is one, for a step that donates it."""
    if mesh is None:
        return jax.tree.map(jnp.copy, params)
    return _lay(params, shardings(params, mesh), jnp.copy)


def put_state(optimizer: optax.GradientTransformation, params: Any, state: Any, mesh: Mesh | None) -> tuple[Any, Any]:
    """Parameters and their optimizer's state on the mesh."""
    if mesh is None:
        return params, state
    of_params, of_state = state_shardings(optimizer, params, mesh)
    return _lay(params, of_params), _lay(state, of_state)


def _lay(tree: Any, where: Any, keep: Callable[[Any], Any] = lambda x: x) -> Any:
    """`keep` of the arrays that have their sharding, and copies of the others in their places."""
    return jax.tree.map(lambda x, s: keep(x) if getattr(x, "sharding", None) == s else put(x, s), tree, where)


def put_batch(batch: dict[str, Any], mesh: Mesh | None) -> dict[str, Any]:
    """A micro-batch sharded along its first axis, rows of tokens (`NAME_BL`) along their length too; scalars (counts)
    are replicated."""
    if mesh is None:
        return batch
    return {
        name: put(np.asarray(value), NamedSharding(mesh, batch_spec(name, np.shape(value), mesh)))
        for name, value in batch.items()
    }


def batch_spec(name: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Where an array of a micro-batch is cut."""
    if not shape:
        return PartitionSpec()
    cut = name.endswith("_BL") and CONTEXT in mesh.shape and shape[1] % mesh.shape[CONTEXT] == 0
    return PartitionSpec(ROWS, CONTEXT) if cut else PartitionSpec(ROWS)


def state_shardings(optimizer: optax.GradientTransformation, params: Any, mesh: Mesh) -> tuple[Any, Any]:
    """Shardings of parameters and optimizer state: moments like their parameters, the rest replicated; arrays that a
    `HostState` has on the host are in its memory.

    A moment is a leaf of the state whose shape is a parameter's and whose path ends in that parameter's path. The
    factors of Adafactor have other shapes, so they are replicated.
    """
    of_params = shardings(params, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    leaves = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(of_params), strict=True)
    known = {(path, leaf.shape): sharding for (path, leaf), sharding in leaves}

    def one(path: Any, leaf: Any) -> NamedSharding:
        # Longest path first: ('mu', 'layers', 'q') -> ('layers', 'q') -> ('q',).
        ends = ((path[start:], leaf.shape) for start in range(len(path)))
        place = next((known[end] for end in ends if end in known), everywhere)
        return place.with_memory_kind(HOST_MEMORY) if _on_host(path) else place

    return of_params, jax.tree_util.tree_map_with_path(one, jax.eval_shape(optimizer.init, params))


def _on_host(path: Any) -> bool:
    # The field of `training.moments.HostState`.
    return any(getattr(key, "name", None) == "on_host" for key in path)


def init_state(optimizer: optax.GradientTransformation, params: Any, mesh: Mesh | None) -> Any:
    """The optimizer's first state, on the mesh where there is one."""
    # Under jit the state is created sharded; no device ever holds all of it.
    where = None if mesh is None else state_shardings(optimizer, params, mesh)[1]
    return jax.jit(optimizer.init, out_shardings=where)(params)


def state_shapes(optimizer: optax.GradientTransformation, params: Any, mesh: Mesh | None) -> tuple[Any, Any]:
    """Shapes of parameters, given as arrays or shapes, and of their optimizer's state, each with its place.

    A checkpoint is restored into these: no array is made to be replaced.
    """
    shapes = params, jax.eval_shape(optimizer.init, params)
    if mesh is None:
        one = SingleDeviceSharding(jax.local_devices()[0])
        places: Any = jax.tree_util.tree_map_with_path(
            lambda path, _: one.with_memory_kind(HOST_MEMORY) if _on_host(path) else one, shapes
        )
    else:
        places = state_shardings(optimizer, params, mesh)
    return _shapes_at(shapes, places)


def gather(tree: Any) -> Any:
    """The tree with complete arrays on this process: NumPy arrays where they are spread over several processes."""
    if all(x.is_fully_addressable for x in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(multihost.to_host, tree)

"""How parameters and activations of a model are sharded over a mesh: rules by name, apart from the mathematics.

Mesh axes: `data` replicates, `fsdp` shards parameters and gathers them layer by layer (Zhao et al., 2023), `tensor`
shards heads, feed-forward and vocabulary (Shoeybi et al., 2019), `context` shards the length of rows; a mesh without
it has their whole length on each device.

Code under a mesh that the caller has set (`rlhf.tuning.mesh.under`) is held to these rules; without one, and on a
single device, the functions here give back what they are given.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rlhf.tuning.compile_target import target_platform

ROWS = ("data", "fsdp")
"""Axes over which a batch is sharded: its rows, and its completions."""
CONTEXT, FSDP, TENSOR = "context", "fsdp", "tensor"
STREAM = (ROWS, CONTEXT, None)
"""Axes of the residual stream [B, L, D]."""
INNER = (ROWS, CONTEXT, TENSOR)
"""Axes of activations between two projections, [B, L, heads or feed-forward]."""
Axis = str | Sequence[str] | None
"""Mesh axes of one dimension."""
_INTO = {"q", "k", "v", "qkv", "gate", "up", "gate_up", "shared_gate", "shared_up"}
"""Projections out of the residual stream: sharded by output over `tensor`."""
_BACK = {"o", "down", "shared_down"}
"""Projections back into it: sharded by input, so that only their sums cross devices."""


def _rule(names: tuple[str, ...], dtype: Any) -> tuple[str | None, ...]:
    """Mesh axes of the last dimensions of the parameter with this path and type."""
    if names[-1] in ("embedding", "head"):
        return ("tensor", "fsdp")
    linear = next((n for n in names if n in _INTO | _BACK), None)
    if linear is None:
        return ()
    size_in, size_out = ("fsdp", "tensor") if linear in _INTO else ("tensor", "fsdp")
    return {
        "kernel": (size_in, size_out),
        # `quantize.Int8` stores (in, out) as int8, `quantize.NF4` (out, in) as uint8.
        "codes": (size_in, size_out) if dtype == jnp.int8 else (size_out, size_in),
        "absmax": (size_out, size_in),
        "bias": (size_out,) if linear in _INTO else (),
        "a": (size_in, None),
        "b": (None, size_out),
    }.get(names[-1], ())


def shardings(params: Any, mesh: Mesh) -> Any:
    """A NamedSharding for each parameter; a dimension that an axis does not divide evenly is not sharded over it."""

    def one(path: Any, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, _of_parameter(path, leaf, mesh))

    return jax.tree_util.tree_map_with_path(one, params)


def path_names(path: Any) -> tuple[str, ...]:
    """The names in the path of a parameter: of nnx states, pure dicts and optimizer states, whose keys differ."""
    names = (str(getattr(k, "key", getattr(k, "name", k))) for k in path)
    return tuple(n for n in names if n != "value")


def _of_parameter(path: Any, leaf: Any, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    names = path_names(path)
    rule = _rule(names, leaf.dtype)
    if (count := _experts(names, leaf.shape)) and count % mesh.shape[FSDP] == 0:
        # Whole experts, which a device gathers as they are in memory.
        rule = (FSDP, *(None if a == FSDP else a for a in rule))
    # The rule is of the last dimensions; a leading axis of layers is not sharded, since the scan slices it.
    dims = leaf.shape[len(leaf.shape) - len(rule) :]
    axes = [a if a and size % mesh.shape[a] == 0 else None for a, size in zip(rule, dims, strict=True)]
    return PartitionSpec(*[None] * (len(leaf.shape) - len(rule)), *axes)


def _experts(names: tuple[str, ...], shape: tuple[int, ...]) -> int:
    """The experts that a kernel holds; 0: it is of none. Layers are stacked, or numbered, or it is in one of them."""
    at = names.index("layers") + 1 if "layers" in names else 0
    stacked = at > 0 and not names[at].isdigit()
    return shape[-3] if names[-1] == "kernel" and len(shape) - stacked == 3 else 0


def mesh_in_use() -> AbstractMesh | None:
    """The mesh that programs are traced for; None on a single device and inside `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.size > 1 and not mesh.manual_axes else None


def parts(mesh: AbstractMesh | None, axis: Axis) -> int:
    """Devices along one axis or several; an axis that the mesh lacks has one."""
    if mesh is None or axis is None:
        return 1
    return math.prod(mesh.shape.get(a, 1) for a in ((axis,) if isinstance(axis, str) else axis))


def dividing(mesh: AbstractMesh, size: int, axis: Axis) -> tuple[str, ...]:
    """Those of the axes that have several devices; none of them where they do not divide the size evenly."""
    names = tuple(a for a in ((axis,) if isinstance(axis, str) else axis or ()) if parts(mesh, a) > 1)
    return names if size % parts(mesh, names) == 0 else ()


def spec(*axes: Axis) -> PartitionSpec:
    """The sharding over these axes, one entry for each dimension; an empty one is not sharded."""
    return PartitionSpec(*(a or None for a in axes))


def constrain(x: jax.Array, *axes: Axis) -> jax.Array:
    """The array, sharded over these axes, one entry for each dimension, forward and backward: so that XLA gathers
    parameters, never rows. A dimension that its axes do not divide evenly is not sharded."""
    mesh = mesh_in_use()
    if mesh is None:
        return x
    cut = spec(*(dividing(mesh, size, a) for size, a in zip(x.shape, axes, strict=True)))
    return jax.lax.with_sharding_constraint(x, cut)


def with_cut_gradients(params: Any) -> Any:
    """Parameters whose gradients are sharded as they are themselves, where they arise: each device keeps its part of a
    sum over rows, and no whole gradient is held.
    """
    mesh = mesh_in_use()
    if mesh is None:
        return params

    def one(path: Any, leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return _with_cut_gradient(_of_parameter(path, leaf, mesh), leaf)

    return jax.tree_util.tree_map_with_path(one, params)


def sum_of_products(product: Callable[..., jax.Array], x: jax.Array, g: jax.Array, back: bool) -> jax.Array:
    """product(x, g) [in, out] of x [B, L, in] and g [B, L, out], a sum over rows and columns: the gradient of a
    projection. Each device sums over its own and keeps its part of the whole sum, as it keeps the projection.

    back: whether the projection is one of those back into the residual stream.
    """
    mesh = mesh_in_use()
    # Elsewhere XLA scatters such a sum by itself; by hand it gathers the projection once more.
    if target_platform() != "tpu" or parts(mesh, FSDP) <= LARGEST_GROUP:
        return product(x, g)
    rows = () if mesh is None else dividing(mesh, x.shape[0], ROWS)
    if mesh is None or x.ndim != 3 or len(rows) < sum(parts(mesh, a) > 1 for a in ROWS):
        return product(x, g)
    columns, of_in, of_out = (
        dividing(mesh, *d)
        for d in zip(
            (x.shape[1], x.shape[2], g.shape[2]), (CONTEXT, *((TENSOR, FSDP) if back else (FSDP, TENSOR))), strict=True
        )
    )
    scattered = FSDP in of_in + of_out

    def local(x: jax.Array, g: jax.Array) -> jax.Array:
        total = product(x, g)
        if scattered:
            total = scattered_sum(total, FSDP, 1 if back else 0)
        others = tuple(a for a in rows + columns if not (scattered and a == FSDP))
        return jax.lax.psum(total, others) if others else total

    specs = tuple(spec(rows, columns, tuple(a for a in axes if a == TENSOR)) for axes in (of_in, of_out))
    return jax.shard_map(local, in_specs=specs, out_specs=spec(of_in, of_out), check_vma=False)(x, g)


LARGEST_GROUP = 8
"""Chips of a reduce-scatter on TPU. Over 16 chips of a v5e XLA makes it a sum of the whole on each chip, of which the
chip keeps its part; over 4 and then 4, or 2 and 8, whatever their places, it does not (libtpu 0.0.42)."""


def scattered_sum(x: jax.Array, axis: str, dimension: int) -> jax.Array:
    """Inside `shard_map`: this device's part, along a dimension, of the sum over the devices of a mesh axis."""
    count = jax.lax.axis_size(axis)
    if target_platform() != "tpu" or count <= LARGEST_GROUP:
        return jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)
    sizes = _group_sizes(count)
    # A device's number on the axis in digits, the first of which says which of the largest parts it has.
    numbers = np.arange(count).reshape(sizes)
    for digit, size in enumerate(sizes):
        groups = np.moveaxis(numbers, digit, -1).reshape(-1, size).tolist()
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, axis_index_groups=groups, tiled=True)
    return x


def _group_sizes(count: int) -> list[int]:
    """Factors of a number, as even as can be; none is more than `LARGEST_GROUP` where its prime factors are not."""
    if count <= LARGEST_GROUP:
        return [count]
    most = min(LARGEST_GROUP, math.isqrt(count))
    first = max(f for f in range(1, most + 1) if count % f == 0)
    return [count] if first == 1 else [first, *_group_sizes(count // first)]


@dataclasses.dataclass(frozen=True)
class HeadCut:
    """How an LM head [V, D] and the positions [M] that it reads are cut over the mesh in use: axes of each that have
    several devices, none where a dimension is whole.

    Positions lie shard by shard, those of a shard part by part over `context`.
    """

    positions: tuple[str, ...]
    vocabulary: tuple[str, ...]
    width: tuple[str, ...]

    @classmethod
    def of(cls, positions: int, vocabulary: int, width: int) -> HeadCut | None:
        """None on a single device, and where the shards of a batch do not divide the positions."""
        mesh = mesh_in_use()
        if mesh is None or positions % parts(mesh, ROWS):
            return None
        shards = dividing(mesh, positions, ROWS)
        over = dividing(mesh, positions // parts(mesh, shards), CONTEXT)
        return cls(shards + over, dividing(mesh, vocabulary, TENSOR), dividing(mesh, width, FSDP))

    def sizes(self, positions: int, vocabulary: int) -> tuple[int, int]:
        """Positions and tokens of the vocabulary of a device."""
        mesh = mesh_in_use()
        return positions // parts(mesh, self.positions), vocabulary // parts(mesh, self.vocabulary)

    @property
    def of_positions(self) -> PartitionSpec:
        """Of arrays [M, ...]."""
        return spec(self.positions)

    @property
    def of_head(self) -> PartitionSpec:
        """Of the head."""
        return spec(self.vocabulary, self.width)

    @property
    def of_tops(self) -> PartitionSpec:
        """Of the greatest logits [slices, M] of slices of each device's part: M numbers a device, not a whole."""
        return spec(self.vocabulary, self.positions)

    @property
    def of_logits(self) -> PartitionSpec:
        """Of logits [slices, M, W], slices of each device's part."""
        return spec(None, self.positions, self.vocabulary)

    @property
    def first(self) -> jax.Array | int:
        """Inside `shard_map`: the first index of this device's part of the vocabulary."""
        return jax.lax.axis_index(self.vocabulary) if self.vocabulary else 0

    def whole(self, part_WD: jax.Array) -> jax.Array:
        """Some tokens of this device's part of the head with their whole width."""
        return jax.lax.all_gather(part_WD, self.width, axis=1, tiled=True) if self.width else part_WD

    def own(self, gradient_WD: jax.Array) -> jax.Array:
        """Of a gradient of such tokens by each device's positions: this device's part of the width, summed over those
        that share it with `fsdp`."""
        return scattered_sum(gradient_WD, FSDP, 1) if self.width else gradient_WD

    def rest(self, gradient: jax.Array) -> jax.Array:
        """The rest of the sum over positions, after `own`."""
        axes = tuple(a for a in self.positions if a not in self.width)
        return jax.lax.psum(gradient, axes) if axes else gradient

    def summed(self, x: Any) -> Any:
        """The sum over the parts of the vocabulary."""
        return jax.lax.psum(x, self.vocabulary) if self.vocabulary else x

    def greatest(self, x: jax.Array) -> jax.Array:
        """The maximum over the parts of the vocabulary."""
        return jax.lax.pmax(x, self.vocabulary) if self.vocabulary else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_cut_gradient(spec: PartitionSpec, x: jax.Array) -> jax.Array:
    return x


def _cut_forward(spec: PartitionSpec, x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _cut_backward(spec: PartitionSpec, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(g, spec),)


_with_cut_gradient.defvjp(_cut_forward, _cut_backward)

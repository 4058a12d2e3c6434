"""Lookups in a table that a mesh divides by vocabulary and by width; embeddings move, the table does not.

Each device looks up, in its part of the table, the tokens of all devices along `fsdp`, whose parts of the width it then
exchanges for its own rows; along `tensor` the owner of a token contributes its embedding and the others zeros
(Shoeybi et al., 2019).

Axes: V vocabulary, D hidden, B rows, L tokens of a row.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from rlhf.tuning.models.sharding import CONTEXT, FSDP, ROWS, TENSOR, dividing, mesh_in_use, spec


def embedded(table_VD: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Rows of the table for tokens [...], as [..., D] in `dtype`."""
    mesh = mesh_in_use()
    cut = None if mesh is None or tokens.ndim != 2 else _Cut.of(mesh, table_VD.shape, tokens.shape)
    if cut is None:
        # Gathered before the cast, so that no copy of the table is made.
        return table_VD[tokens].astype(dtype)
    return _lookup(table_VD, tokens, jnp.dtype(dtype), cut)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Mesh axes of each dimension; an empty tuple where it is whole."""

    vocabulary: tuple[str, ...]
    width: tuple[str, ...]
    rows: tuple[str, ...]
    length: tuple[str, ...]

    @classmethod
    def of(cls, mesh: AbstractMesh, table: tuple[int, ...], tokens: tuple[int, ...]) -> _Cut | None:
        """None where rows are not cut, though the table's width is: there XLA finds a way."""
        dims = zip((*table, *tokens), (TENSOR, FSDP, ROWS, CONTEXT), strict=True)
        cut = cls(*(dividing(mesh, size, axis) for size, axis in dims))
        return None if cut.width and FSDP not in cut.rows else cut

    @property
    def table(self) -> PartitionSpec:
        return spec(self.vocabulary, self.width)

    @property
    def tokens(self) -> PartitionSpec:
        return spec(self.rows, self.length)

    def local(self, tokens_BL: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
        """The tokens that this device looks up, counted from its first, and which of them it has."""
        if self.width:
            tokens_BL = jax.lax.all_gather(tokens_BL, FSDP, axis=0, tiled=True)
        if self.vocabulary:
            tokens_BL = tokens_BL - jax.lax.axis_index(TENSOR) * tokens
        mine = (tokens_BL >= 0) & (tokens_BL < tokens)
        return jnp.where(mine, tokens_BL, 0), mine


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table_VD: jax.Array, tokens_BL: jax.Array, dtype: jnp.dtype, cut: _Cut) -> jax.Array:
    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        index, mine = cut.local(tokens, table.shape[0])
        x = jnp.where(mine[..., None], table[index], 0).astype(dtype)
        if cut.width:
            x = jax.lax.all_to_all(x, FSDP, split_axis=0, concat_axis=2, tiled=True)
        # All but one of the summands are zero: the sum is exact.
        return jax.lax.psum(x, TENSOR) if cut.vocabulary else x

    by_device = jax.shard_map(local, in_specs=(cut.table, cut.tokens), out_specs=cut.tokens, check_vma=False)
    return by_device(table_VD, tokens_BL)


def _forward(table_VD: jax.Array, tokens_BL: jax.Array, dtype: jnp.dtype, cut: _Cut) -> Any:
    # An array of no elements carries the table's type to the backward pass, its size comes from the shape.
    return _lookup(table_VD, tokens_BL, dtype, cut), (jnp.zeros((table_VD.shape[0], 0), table_VD.dtype), tokens_BL)


def _backward(dtype: jnp.dtype, cut: _Cut, saved: Any, g_BLD: jax.Array) -> tuple[jax.Array, None]:
    like, tokens_BL = saved

    def local(like: jax.Array, tokens: jax.Array, g: jax.Array) -> jax.Array:
        index, mine = cut.local(tokens, like.shape[0])
        if cut.width:
            g = jax.lax.all_to_all(g, FSDP, split_axis=2, concat_axis=0, tiled=True)
        g = jnp.where(mine[..., None], g, 0).astype(like.dtype)
        table = jnp.zeros((like.shape[0], g.shape[-1]), like.dtype).at[index].add(g)
        # Rows of other devices; those along `fsdp` are here already where the width is cut.
        others = tuple(a for a in (*cut.rows, *cut.length) if a not in cut.width)
        return jax.lax.psum(table, others) if others else table

    specs = spec(cut.vocabulary), cut.tokens, cut.tokens
    by_device = jax.shard_map(local, in_specs=specs, out_specs=cut.table, check_vma=False)
    return by_device(like, tokens_BL, g_BLD), None


_lookup.defvjp(_forward, _backward)

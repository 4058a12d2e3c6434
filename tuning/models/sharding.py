"""How the parameters of a model are sharded over a mesh: rules by name, apart from the mathematics.

Mesh axes: `data` replicates, `fsdp` shards parameters and gathers them layer by layer (Zhao et al., 2023), `tensor`
shards heads, feed-forward and vocabulary (Shoeybi et al., 2019).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS = ("data", "fsdp")
"""Axes over which a batch is sharded: its rows, and its completions."""
_INTO = {"q", "k", "v", "gate", "up"}
"""Projections out of the residual stream: sharded by output over `tensor`."""
_BACK = {"o", "down"}
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
        # Paths of nnx states, pure dicts and optimizer states have keys of different types.
        names = tuple(str(getattr(k, "key", getattr(k, "name", k))) for k in path)
        rule = _rule(tuple(n for n in names if n != "value"), leaf.dtype)
        # The rule is of the last dimensions; a leading axis of layers is not sharded, since the scan slices it.
        dims = leaf.shape[len(leaf.shape) - len(rule) :]
        axes = [a if a and size % mesh.shape[a] == 0 else None for a, size in zip(rule, dims, strict=True)]
        return NamedSharding(mesh, PartitionSpec(*[None] * (len(leaf.shape) - len(rule)), *axes))

    return jax.tree_util.tree_map_with_path(one, params)

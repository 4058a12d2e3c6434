"""Products of few rows with a large matrix, which decoding consists of, by a kernel (`products.c`).

The matrix lies as [O, I], an output's weights beside each other: it is read once, from front to back. A row has the
same results, to the bit, among whatever other rows it is, and a row of zeros costs next to nothing.

Axes: R rows, I in, O out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

FEW_ROWS = 32
"""Up to which XLA on CPU passes over the matrix faster where it is the left operand."""
MANY_ROWS = 192
"""Above which XLA, which copies the matrix into its own order first, is faster than the kernel."""


def suits(dtype: str) -> bool:
    """Whether the kernel is for this backend and type."""
    return jax.default_backend() == "cpu" and dtype == "float32"


def product(x: jax.Array, weight_OI: jax.Array, target: str | None) -> jax.Array:
    """x [..., I] times the transpose of a matrix of its type -> [..., O] in at least float32.

    `target` is the name under which XLA knows the kernel, for what it suits; None leaves all to XLA.
    """
    rows, outs = x.reshape(-1, x.shape[-1]), len(weight_OI)
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    if target and len(rows) <= MANY_ROWS:
        # The kernel takes this for granted.
        assert x.dtype == weight_OI.dtype == jnp.float32 and x.shape[-1] == weight_OI.shape[1]
        out = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((len(rows), outs), accumulate))(rows, weight_OI)
    elif len(rows) <= FEW_ROWS:
        out = jnp.einsum("oi,ri->or", weight_OI, rows, preferred_element_type=accumulate)
        # The barrier keeps the operands in this order.
        out = jax.lax.optimization_barrier(out).T
    else:
        out = jnp.einsum("ri,oi->ro", rows, weight_OI, preferred_element_type=accumulate)
    return out.reshape(*x.shape[:-1], outs)


class OutIn(nnx.Module):
    """The kernel of a `linear.Linear` as [O, I]; `target` as in `product`."""

    def __init__(self, kernel_IO: jax.Array):
        self.weight = nnx.Param(kernel_IO.T)
        self.target: str | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        return product(x, self.weight[...], self.target).astype(x.dtype)

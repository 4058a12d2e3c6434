"""Products with large matrices, which decoding's few rows and prefill consist of, by a kernel (`products.c`).

The matrix lies as [O, I], an output's weights beside each other: it is read once, from front to back. A row has the
same results, to the bit, among whatever other rows it is, and a row of zeros costs next to nothing. Matrices are in
stacks, of which the kernel takes one by its number: a loop over layers copies nothing out of them.

Axes: R rows, I in, O out, N matrices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

FEW_ROWS = 32
"""Up to which XLA on CPU passes over the matrix faster where it is the left operand."""


def suits(dtype: str) -> bool:
    """Whether the kernel is for this backend and type."""
    return jax.default_backend() == "cpu" and dtype == "float32"


def product(x: jax.Array, weight_NOI: jax.Array, number: jax.Array | int, target: str | None) -> jax.Array:
    """x [..., I] times the transpose of one matrix of its type -> [..., O] in at least float32.

    `target` is the name under which XLA knows the kernel, for what it suits; None leaves the product to XLA, which
    copies the matrix first where a loop counts the number.
    """
    rows, outs = x.reshape(-1, x.shape[-1]), weight_NOI.shape[1]
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    if target:
        # The kernel takes this for granted.
        assert x.dtype == weight_NOI.dtype == jnp.float32 and x.shape[-1] == weight_NOI.shape[2]
        call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((len(rows), outs), accumulate))
        out = call(rows, weight_NOI, jnp.asarray(number, jnp.int32))
    elif len(rows) <= FEW_ROWS:
        out = jnp.einsum("oi,ri->or", weight_NOI[number], rows, preferred_element_type=accumulate)
        # The barrier keeps the operands in this order.
        out = jax.lax.optimization_barrier(out).T
    else:
        out = jnp.einsum("ri,oi->ro", rows, weight_NOI[number], preferred_element_type=accumulate)
    return out.reshape(*x.shape[:-1], outs)


class InStack(nnx.Variable):
    """A parameter of which a loop over layers takes no slice."""


class OutIn(nnx.Module):
    """The kernel of a `linear.Linear` as [O, I]; stacked, [N, O, I], one of them at a time.

    `number` says which, `target` is as in `product`; both are set before use.
    """

    number: jax.Array | int = 0
    target: str | None = None

    def __init__(self, kernel_IO: jax.Array):
        self.weight = InStack(kernel_IO.T)

    def __call__(self, x: jax.Array) -> jax.Array:
        return product(x, self.weight[...], self.number, self.target).astype(x.dtype)

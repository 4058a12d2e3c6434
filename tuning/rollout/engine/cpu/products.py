"""Matrix products of decoding and prefill by a kernel (`products.c`).

The matrix is stored as [O, I], so that it is read once, front to back. A row's result is bit-identical whatever other
rows are in the batch, and a row of zeros costs almost nothing. The kernel takes a stack of matrices and an index: a
loop over layers copies nothing out of the stack.

Axes: R rows, I in, O out, N matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.models.experts import in_blocks
from rlhf.tuning.models.matmul import factor
from rlhf.tuning.models.quantize import Stored, int8_decode, int8_encode


def suits(dtype: str) -> bool:
    """Whether the kernel supports this backend and type of computation; weights may be in int8."""
    return target_platform() == "cpu" and dtype in ("float32", "bfloat16")


def product(
    x: jax.Array, weight_NOI: jax.Array, number: jax.Array | int, target: str | None, scale_O: jax.Array | None = None
) -> jax.Array:
    """x [..., I] times the transpose of one matrix -> [..., O] in at least float32.

    The matrix has the type of x; or it is int8, and `scale_O` is the factor of each output's weights. `target` is the
    registered name of the kernel, for types that it supports. None leaves the product to XLA, which copies the matrix
    out of the stack first if `number` is the counter of a loop.
    """
    rows, outs = x.reshape(-1, x.shape[-1]), weight_NOI.shape[1]
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    if target:
        # The kernel does not check this.
        assert weight_NOI.dtype == (factor(x).dtype if scale_O is None else jnp.int8)
        assert x.shape[-1] == weight_NOI.shape[2]
        call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((len(rows), outs), jnp.float32))
        # Rows go in as float32, whatever the type of the weights; sums are in float32.
        scales = () if scale_O is None else (scale_O,)
        rows = rows if scale_O is not None else factor(rows)
        out = call(rows.astype(jnp.float32), weight_NOI, jnp.asarray(number, jnp.int32), *scales)
        return out.reshape(*x.shape[:-1], outs)
    weight = weight_NOI[number]
    if scale_O is not None:
        weight = int8_decode((weight, scale_O[:, None]), x.dtype)
    else:
        rows = factor(rows)
    out = jnp.einsum("ri,oi->ro", rows, weight, preferred_element_type=accumulate)
    return out.reshape(*x.shape[:-1], outs)


class InStack(nnx.Variable):
    """A stacked parameter that a loop over layers passes on undivided."""


class OutIn(nnx.Module):
    """The kernel of a `linear.Linear` as [O, I]; stacked, [N, O, I], one of them at a time. In int8 as `quantize.Int8`.

    `number` is the index, `target` as in `product`; both are set before use.
    """

    number: jax.Array | int = 0
    target: str | None = None
    scale: Stored

    def __init__(self, kernels_IO: Sequence[jax.Array], *, int8: bool = False):
        """kernels_IO: of one input, whose outputs follow each other; of experts [E, I, O]."""
        if int8:
            encoded = [int8_encode(kernel) for kernel in kernels_IO]
            kernels_IO = [kernel for kernel, _ in encoded]
            self.scale = Stored(jnp.concatenate([scale[0] for _, scale in encoded]))
        # XLA on CPU is slow at transposing what it makes at the same time, and at joining rows of few numbers.
        turned = [jax.lax.optimization_barrier(kernel).mT for kernel in kernels_IO]
        self.weight = InStack(jnp.concatenate(turned, axis=-2))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...] if hasattr(self, "scale") else None
        return product(x, self.weight[...], self.number, self.target, scale).astype(x.dtype)

    def grouped(self, x_RI: jax.Array, sizes_E: jax.Array) -> jax.Array:
        """Products of rows, sorted by expert, with the matrix of each (`experts.grouped`)."""
        *_, experts, out, size = self.weight.shape
        stack = self.weight[...].reshape(-1, out, size)

        def of_one(rows: jax.Array, expert: jax.Array) -> jax.Array:
            return product(rows, stack, self.number * experts + expert, self.target).astype(x_RI.dtype)

        return in_blocks(x_RI, sizes_E, out, x_RI.dtype, of_one)

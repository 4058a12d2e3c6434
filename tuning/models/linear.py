"""The linear map of every projection; weights are stored (in, out)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rlhf.tuning.models.matmul import matmul
from rlhf.tuning.precision import real, rounds_products

INIT = nnx.initializers.normal(0.02)
JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Projections of one input that are joined into one product, in the order of their outputs."""


class Linear(nnx.Module):
    """x [..., in] -> [..., out] in the type of x; master weights in the type of `precision.real`.

    `kernel` is a parameter, or a module that stores it in another form and applies it (`quantize`). A module named
    `adapter` adds its output (`lora`). Both are set after construction.
    """

    kernel: Any
    adapter: Any

    def __init__(self, size_in: int, size_out: int, *, bias: bool = False, back: bool = False, rngs: nnx.Rngs):
        # Whether it leads back into the residual stream: what a mesh cuts then is its input, else its output.
        self.back = back
        self.kernel = nnx.Param(INIT(rngs.params(), (size_in, size_out), real()))
        if bias:
            self.bias = nnx.Param(jnp.zeros(size_out, real()))

    def __call__(self, x: jax.Array) -> jax.Array:
        out = self._product(x)
        return out + self.bias[...].astype(x.dtype) if hasattr(self, "bias") else out

    def _product(self, x: jax.Array) -> jax.Array:
        dense = isinstance(self.kernel, nnx.Variable)
        if not hasattr(self, "adapter"):
            return matmul(x, self.kernel[...], self.back) if dense else self.kernel(x)
        if not rounds_products():
            return (matmul(x, self.kernel[...], self.back) if dense else self.kernel(x)) + self.adapter(x)
        # Rounded as a sampler rounds, which has both in one kernel; the factors' gradients come by the way of low rank.
        kernel = (self.kernel[...] if dense else self.kernel.dense()) + self.adapter.dense()
        apart = self.adapter(jax.lax.stop_gradient(x))
        return matmul(x, jax.lax.stop_gradient(kernel), self.back) + (apart - jax.lax.stop_gradient(apart))

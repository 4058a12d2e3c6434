"""The linear map of every projection; weights are stored (in, out)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

_INIT = nnx.initializers.normal(0.02)


class Linear(nnx.Module):
    """x [..., in] -> [..., out] in the type of x; float32 master weights."""

    def __init__(self, size_in: int, size_out: int, *, bias: bool = False, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_INIT(rngs.params(), (size_in, size_out), jnp.float32))
        if bias:
            self.bias = nnx.Param(jnp.zeros(size_out))

    def __call__(self, x: jax.Array) -> jax.Array:
        out = x @ self.kernel[...].astype(x.dtype)
        return out + self.bias[...].astype(x.dtype) if hasattr(self, "bias") else out

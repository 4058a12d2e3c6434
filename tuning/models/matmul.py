"""Matrix products whose gradients suit the backend."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from tuning.models.sharding import sum_of_products


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: jax.Array, weight: jax.Array, back: bool = False) -> jax.Array:
    """x [..., in] @ weight [in, out] -> [..., out] in the type of x; the weight's gradient accumulates in its own.

    back: whether the weight leads back into the residual stream, as a mesh cuts it (`tuning.models.sharding`).

    JAX derives the weight's gradient as the transpose of g^T x. For that XLA on CPU writes a transposed copy of g and
    computes the inputs of g twice; x^T g needs neither.
    """
    return x @ weight.astype(x.dtype)


def _forward(x: jax.Array, weight: jax.Array, back: bool) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul(x, weight, back), (x, weight)


def _backward(back: bool, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    leading = tuple(range(x.ndim - 1))
    dx = jax.lax.dot_general(g, weight.astype(g.dtype), (((g.ndim - 1,), (1,)), ((), ())))
    accumulate = jnp.promote_types(x.dtype, weight.dtype)
    # Contracts all leading axes at once: [..., in], [..., out] -> [in, out].
    dw = sum_of_products(
        lambda x, g: jax.lax.dot_general(x, g, ((leading, leading), ((), ())), preferred_element_type=accumulate),
        *(x, g, back),
    )
    return dx, dw.astype(weight.dtype)


matmul.defvjp(_forward, _backward)

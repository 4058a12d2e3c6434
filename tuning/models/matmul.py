"""Matrix products whose gradients suit the backend, and whose inputs are rounded where the compute dtype says so."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from tuning.models.sharding import sum_of_products
from tuning.precision import rounds_products

WIDTH = 192
"""Columns, at most, of a block that is transposed at a time."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: jax.Array, weight: jax.Array, back: bool = False) -> jax.Array:
    """x [..., in] @ weight [in, out] -> [..., out] in the type of x; the weight's gradient accumulates in its own.

    back: whether the weight leads back into the residual stream, as a mesh cuts it (`tuning.models.sharding`).

    JAX derives the weight's gradient as the transpose of g^T x. For that XLA on CPU writes a transposed copy of g and
    computes the inputs of g twice; x^T g needs neither.
    """
    weight = factor(weight.astype(x.dtype))
    return jax.lax.dot_general(factor(x), weight, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=x.dtype)


def factor(x: jax.Array) -> jax.Array:
    """An array as a product reads it: rounded to bfloat16 where it is float32 and `precision.rounds_products`.

    The product of two such numbers is exact in float32, and sums run in float32: give `preferred_element_type`.
    """
    return x.astype(factor_type(x.dtype.name))


def factor_type(dtype: str) -> str:
    """The type in which a product reads arrays of a type: matrices that are products' alone may be stored in it."""
    return "bfloat16" if dtype == "float32" and rounds_products() else dtype


def _forward(x: jax.Array, weight: jax.Array, back: bool) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Rounded: half of what a gradient keeps.
    return matmul(x, weight, back), (factor(x), weight)


def _backward(back: bool, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    leading = tuple(range(x.ndim - 1))
    like = factor(weight.astype(g.dtype))
    accumulate, kind, g = jnp.promote_types(x.dtype, weight.dtype), g.dtype, factor(g)
    dx = jax.lax.dot_general(g, like, (((g.ndim - 1,), (1,)), ((), ())), preferred_element_type=kind)

    def summed(x: jax.Array, g: jax.Array) -> jax.Array:
        # Contracts all leading axes at once: [..., in], [..., out] -> [in, out].
        if rounds_products():
            return across(x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1]), accumulate)
        # Axes stay as a mesh has cut them.
        return jax.lax.dot_general(x, g, ((leading, leading), ((), ())), preferred_element_type=accumulate)

    return dx, sum_of_products(summed, x, g, back).astype(weight.dtype)


matmul.defvjp(_forward, _backward)


def across(x: jax.Array, y: jax.Array, kind: Any) -> jax.Array:
    """x^T y of x [T, in] and y [T, out] in the type `kind`: a product over rows, of factors.

    Where products are rounded: XLA on CPU multiplies bfloat16 only where the left operand is summed over its last axis,
    and computes in float32 otherwise. A transposition that it can see it moves into the product, so that one is in a
    loop.
    """
    size = x.shape[1]
    width = math.gcd(size, WIDTH)
    # XLA takes a loop of one round apart, and small blocks cost more than they save.
    if not rounds_products() or width < 8 or width == size:
        return jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=kind)
    blocks = jax.lax.map(
        lambda start: jax.lax.dynamic_slice_in_dim(x, start, width, axis=1).T, jnp.arange(0, size, width)
    )
    return jax.lax.dot_general(blocks.reshape(size, -1), y, (((1,), (0,)), ((), ())), preferred_element_type=kind)

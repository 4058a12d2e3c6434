"""Matrix products whose gradients suit the backend, and whose inputs are rounded where the compute dtype says so."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.cpu.kernels import build
from rlhf.tuning.models.sharding import mesh_in_use, sum_of_products
from rlhf.tuning.precision import of_gradients, rounds_products


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: jax.Array, weight: jax.Array, back: bool = False) -> jax.Array:
    """x [..., in] @ weight [in, out] -> [..., out] in the type of x; the weight's gradient accumulates in its own.

    back: whether the weight leads back into the residual stream, as a mesh cuts it (`rlhf.tuning.models.sharding`).

    JAX derives the weight's gradient as the transpose of g^T x. For that XLA on CPU writes a transposed copy of g and
    computes the inputs of g twice; x^T g needs neither.
    """
    weight = weight.astype(x.dtype)
    return contract(x, weight, x.ndim - 1, 0, x.dtype)


def contract(x: jax.Array, y: jax.Array, of_x: int, of_y: int, kind: Any) -> jax.Array:
    """The sum over one axis of x and of the matrix y, in the type `kind`, as a product reads them (`factor`).

    x has two axes, or is summed over its last one. For functions with a custom gradient, because a kernel has none.
    """
    kernel = _kernel(x, y, of_x, kind)
    if kernel is None:
        return jax.lax.dot_general(factor(x), factor(y), (((of_x,), (of_y,)), ((), ())), preferred_element_type=kind)
    leading = x.shape[:-1] if of_x == x.ndim - 1 else x.shape[1:]
    rows = x.reshape(-1, x.shape[-1])
    count, size, depth = math.prod(leading), y.shape[1 - of_y], y.shape[of_y]
    packed = -(-min(count, size) // _SIDE) * -(-depth // _DEEP) * _TILE + _LINE
    shapes = jax.ShapeDtypeStruct((count, size), kind), jax.ShapeDtypeStruct((packed,), jnp.uint8)
    call = jax.ffi.ffi_call(kernel, shapes, vmap_method="sequential")
    out, _ = call(rows, y, across=np.int32((of_x != x.ndim - 1) + 2 * of_y))
    return out.reshape(*leading, size)


_SIDE, _DEEP, _TILE, _LINE = 16, 32, 1024, 64
"""Of a tile of the kernel: rows, columns, bytes; and of a line of a cache."""
_FEW, _SHALLOW = 2**22, 64
"""With fewer products of numbers XLA ends before the kernel's threads have begun; sums of fewer are filled up."""


def _kernel(x: jax.Array, y: jax.Array, of_x: int, kind: Any) -> str | None:
    """The kernel's name where one is made for such a product: XLA writes the rounded and transposed factors to memory
    first, and reaches a quarter of a matrix unit's rate, a half of vectors' in some products
    (`docs/explanation/benchmarks.md`)."""
    depth = x.shape[of_x]
    whole = kind == jnp.float32 and {x.dtype.name, y.dtype.name} <= {"float32", "bfloat16"}
    few = depth < _SHALLOW or x.size * y.size <= _FEW * depth
    if not whole or not rounds_products() or mesh_in_use() or few:
        return None
    # A build takes seconds, and warns where it fails.
    return build().matmul


def factor(x: jax.Array) -> jax.Array:
    """An array as a product reads it: rounded to bfloat16 where it is float32 and `precision.rounds_products`.

    The product of two such numbers is exact in float32, and sums run in float32: give `preferred_element_type`.
    """
    return x.astype(factor_type(x.dtype.name))


def factor_type(dtype: str) -> str:
    """The type in which a product reads arrays of a type: matrices that are products' alone may be stored in it."""
    return "bfloat16" if dtype == "float32" and rounds_products() else dtype


def soft_cap(logits: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(logits / cap); the logits themselves without a cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _forward(x: jax.Array, weight: jax.Array, back: bool) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    out = matmul(x, weight, back)
    with of_gradients():
        # Rounded: half of what a gradient keeps.
        return out, (factor(x), weight)


@of_gradients()
def _backward(back: bool, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    accumulate, kind = jnp.promote_types(x.dtype, weight.dtype), g.dtype
    dx = contract(g, weight.astype(kind), g.ndim - 1, 1, kind)

    def summed(x: jax.Array, g: jax.Array) -> jax.Array:
        # Contracts all leading axes at once: [..., in], [..., out] -> [in, out].
        if rounds_products():
            return contract(x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1]), 0, 0, accumulate)
        return _over_rows(x, g, accumulate)

    return dx, sum_of_products(summed, x, g, back).astype(weight.dtype)


matmul.defvjp(_forward, _backward)


def _over_rows(x: jax.Array, y: jax.Array, kind: Any) -> jax.Array:
    """x^T y of x [..., in] and y [..., out] in the type `kind`, exact.

    XLA on CPU transposes the left factor, and the product then reads memory across its rows: a wide one
    took a twentieth of the memory's rate. So the narrower one is transposed, once it is in memory.
    """
    if target_platform() != "cpu" or mesh_in_use():
        # Axes stay as a mesh has cut them.
        leading = tuple(range(x.ndim - 1))
        return jax.lax.dot_general(x, y, ((leading, leading), ((), ())), preferred_element_type=kind)
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    turned = x.shape[1] > y.shape[1]
    left, right = (jax.lax.optimization_barrier(y), x) if turned else (x, y)
    out = jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=kind)
    return out.T if turned else out


def thin(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] @ weight [in, out] of one type, exact, for a weight with one far shorter side."""
    return _thin(x, weight) if target_platform() == "cpu" and not mesh_in_use() else x @ weight


@jax.custom_vjp
def _thin(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x @ weight


def _thin_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    return g @ weight.T, _over_rows(x, g, jnp.promote_types(x.dtype, jnp.float32)).astype(weight.dtype)


_thin.defvjp(lambda x, weight: (x @ weight, (x, weight)), _thin_backward)

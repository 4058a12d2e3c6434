"""Frozen kernels in 8 or 4 bits (Dettmers et al., 2022, 2023), dequantised layer by layer when they are used.

Axes: I in, O out, C blocks of a row. A leading axis of layers may stand before them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rlhf.tuning.models.matmul import contract, factor
from rlhf.tuning.precision import of_gradients

BLOCK = 64
"""Weights that share one absmax in NF4."""
OUTER = 256
"""Absmax values that share one scale (double quantisation)."""

# NormalFloat-4 (Dettmers et al., 2023, appendix E): quantiles of a normal distribution, scaled to [-1, 1], with a zero.
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class Stored(nnx.Variable):
    """A part of a quantised kernel; never trained."""


@functools.partial(jax.jit, static_argnums=0)
def _by_layer(f: Callable[..., Any], arrays: Any) -> Any:
    # `map` rather than `vmap`: temporaries of one layer, not of the stack.
    stacked = (arrays if isinstance(arrays, tuple) else (arrays,))[0].ndim == 3
    return jax.lax.map(f, arrays) if stacked else f(arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(dense: Callable[..., jax.Array], x: jax.Array, stored: tuple[jax.Array, ...]) -> jax.Array:
    # Rounded as it is made: a kernel's arguments are arrays in memory.
    return contract(x, factor(dense(stored, x.dtype)), x.ndim - 1, 0, x.dtype)


# Autodiff would keep the dense kernel of every layer for the backward pass; this keeps the stored form.
def _matmul_forward(dense: Callable[..., jax.Array], x: jax.Array, stored: tuple[jax.Array, ...]) -> Any:
    return _matmul(dense, x, stored), stored


@of_gradients()
def _matmul_backward(dense: Callable[..., jax.Array], stored: tuple[jax.Array, ...], g: jax.Array) -> Any:
    # Frozen kernels have no gradient.
    return contract(g, factor(dense(stored, g.dtype)), g.ndim - 1, 1, g.dtype), None


_matmul.defvjp(_matmul_forward, _matmul_backward)


class Int8(nnx.Module):
    """One byte a weight and one float32 absmax an output channel; the error is at most absmax / 254."""

    def __init__(self, kernel_IO: jax.Array):
        self.codes, self.scale = map(Stored, _by_layer(int8_encode, kernel_IO))

    def dense(self) -> jax.Array:
        """The kernel [I, O] in float32."""
        return int8_decode((self.codes[...], self.scale[...]), jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        return _int8_matmul(x, self.codes[...], self.scale[...])


@jax.custom_vjp
def _int8_matmul(x: jax.Array, codes_IO: jax.Array, scale_1O: jax.Array) -> jax.Array:
    """x [..., I] times the kernel. The scale is applied to the sums, in at least float32: bfloat16 holds the codes
    exactly, and XLA for GPUs converts them inside the product, where it would write a scaled kernel to memory."""
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    return (contract(x, factor(codes_IO.astype(x.dtype)), x.ndim - 1, 0, accumulate) * scale_1O[0]).astype(x.dtype)


_int8_matmul.defvjp(
    lambda x, *stored: (_int8_matmul(x, *stored), stored),
    lambda stored, g: (*_matmul_backward(int8_decode, stored, g), None),
)


def int8_encode(kernel_IO: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes [I, O] int8 and scales [1, O] float32."""
    kernel_IO = kernel_IO.astype(jnp.float32)
    scale = jnp.max(jnp.abs(kernel_IO), axis=-2, keepdims=True) / 127
    # A channel of zeros has scale 0.
    codes = jnp.round(kernel_IO / jnp.where(scale > 0, scale, 1.0))
    return codes.astype(jnp.int8), scale


def int8_decode(stored: tuple[jax.Array, ...], dtype: Any) -> jax.Array:
    """The kernel that `int8_encode` stored."""
    codes, scale = stored
    return (codes.astype(jnp.float32) * scale).astype(dtype)


class NF4(nnx.Module):
    """NF4 with double quantisation: 4.13 bits a weight (4 + 8 / BLOCK for the absmax + 32 / (BLOCK * OUTER)).

    Blocks of 64 run along the input of each output row, and the first weight of a byte is in the high bits. For input
    sizes that are multiples of 64 this is the layout of bitsandbytes; other rows are padded to a multiple.
    """

    def __init__(self, kernel_IO: jax.Array):
        self.size = kernel_IO.shape[-2]
        self.codes, self.absmax, self.scale, self.mean = map(Stored, _by_layer(nf4_encode, kernel_IO))

    def _stored(self) -> tuple[jax.Array, ...]:
        return self.codes[...], self.absmax[...], self.scale[...], self.mean[...]

    def dense(self) -> jax.Array:
        """The kernel [I, O] in float32."""
        return _by_layer(functools.partial(nf4_decode, self.size, dtype=jnp.float32), self._stored())

    def __call__(self, x: jax.Array) -> jax.Array:
        return _matmul(functools.partial(nf4_decode, self.size), x, self._stored())


def nf4_encode(kernel_IO: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Codes [O, C * 32] uint8 (two a byte), absmax [O, C] int8, its scales [O * C / 256] and mean [] float32."""
    rows = jnp.pad(kernel_IO.T.astype(jnp.float32), ((0, 0), (0, -kernel_IO.shape[0] % BLOCK)))
    blocks = rows.reshape(rows.shape[0], -1, BLOCK)
    absmax_OC = jnp.max(jnp.abs(blocks), axis=-1)
    levels = jnp.asarray(NF4_LEVELS, jnp.float32)
    scaled = blocks / jnp.where(absmax_OC > 0, absmax_OC, 1.0)[..., None]
    codes = jnp.zeros(blocks.shape, jnp.uint8)
    # The nearest level's number is the count of midpoints below. Sixteen distances would take sixteen times the memory.
    for bound in (levels[1:] + levels[:-1]) / 2:
        codes += scaled > bound
    packed = (codes[..., ::2] << 4) | codes[..., 1::2]
    # The second quantisation: absmax values are positive, so centring saves a bit.
    mean = jnp.mean(absmax_OC)
    groups = _in_groups(absmax_OC - mean)
    scale = jnp.max(jnp.abs(groups), axis=-1) / 127
    absmax = jnp.round(groups / jnp.where(scale > 0, scale, 1.0)[:, None]).astype(jnp.int8)
    absmax = absmax.reshape(-1)[: absmax_OC.size].reshape(absmax_OC.shape)
    return packed.reshape(rows.shape[0], -1), absmax, scale, mean


def nf4_decode(size: int, stored: tuple[jax.Array, ...], dtype: Any) -> jax.Array:
    """The kernel [size, O] that `nf4_encode` stored."""
    packed, absmax_OC, scale, mean = stored
    groups = _in_groups(absmax_OC.astype(jnp.float32)) * scale[:, None]
    absmax_OC11 = (groups.reshape(-1)[: absmax_OC.size].reshape(absmax_OC.shape) + mean)[..., None, None]
    bytes_OC = packed.reshape(*absmax_OC.shape, BLOCK // 2)
    codes = jnp.stack([bytes_OC >> 4, bytes_OC & 15], axis=-1)
    # Selects by one bit after the other fuse; a gather does not, and is slow on TPU. The levels are scaled before:
    # as constants of the full shape they would leave the loop over layers and stay in memory.
    values = [level * absmax_OC11 for level in NF4_LEVELS]
    for bit in range(4):
        odd = (codes >> bit) & 1 == 1
        values = [jnp.where(odd, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    rows = values[0].astype(dtype).reshape(absmax_OC.shape[0], -1)
    return rows[:, :size].T


def _in_groups(x_OC: jax.Array) -> jax.Array:
    """[O, C] flattened to [O * C / 256, 256], zeros at the end."""
    return jnp.pad(x_OC.reshape(-1), (0, -x_OC.size % OUTER)).reshape(-1, OUTER)


FORMATS: dict[str, type[Int8] | type[NF4]] = {"int8": Int8, "nf4": NF4}

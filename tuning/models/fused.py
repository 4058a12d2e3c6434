"""Attention of packed rows and its gradient by a kernel for CPUs with AVX-512 (`fused.c`).

XLA on CPU takes six times as long as its products would at their full rate: its products of small matrices reach a half
of it, and intermediate values go through memory. Axes as in `blocked`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.cpu.kernels import build
from rlhf.tuning.models.blocked import Segments, of_sinks
from rlhf.tuning.models.remat import ATTENTION, keep
from rlhf.tuning.models.sharding import mesh_in_use

LANES = 16
"""The kernel's vectors: a head's size must be a multiple."""
_NO_WINDOW = 2**31 - 1


def suits(q_BLNH: jax.Array, k_BLKH: jax.Array, v_BLKH: jax.Array, softcap: float | None) -> bool:
    """Whether the kernel is there and supports such arrays, on one device."""
    if target_platform() != "cpu" or mesh_in_use() is not None or softcap is not None:
        return False
    (b, length, _, size), kinds = q_BLNH.shape, {x.dtype.name for x in (q_BLNH, k_BLKH, v_BLKH)}
    heads = k_BLKH.shape[2]
    whole = k_BLKH.shape == v_BLKH.shape == (b, length, heads, size) and size % LANES == q_BLNH.shape[2] % heads == 0
    # A build takes seconds, and warns where it fails.
    return whole and kinds == {"float32"} and build().fused_forward is not None


def fused_attention(
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    segments: Segments,
    window: jax.Array | int | None,
    scale: float,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """softmax(mask(scale * q k)) v, [B, L, N, H], of float32 arrays that `suits` accepts, all columns of their rows.

    sinks_N: as of `blocked_attention`. window: at least 1; it has no gradient.
    """
    if isinstance(window, jax.Array):
        limit = jnp.minimum(window, jnp.asarray(_NO_WINDOW, window.dtype))
    else:
        limit = jnp.asarray(_NO_WINDOW if window is None else min(int(window), _NO_WINDOW), jnp.int32)
    columns = tuple(jnp.broadcast_to(x, q_BLNH.shape[:2]) for x in segments[:3])
    kernels = build()
    names = str(kernels.fused_forward), str(kernels.fused_backward)
    spans = tuple(x.astype(jnp.int32) for x in (*columns, limit))
    return _attention(q_BLNH, k_BLKH, v_BLKH, sinks_N, spans, scale, names)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(*args: Any) -> jax.Array:
    return _forward(*args)[0]


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    columns: tuple[jax.Array, ...],
    scale: float,
    names: tuple[str, str],
) -> tuple[jax.Array, tuple[Any, ...]]:
    shapes = jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    call = jax.ffi.ffi_call(names[0], shapes, vmap_method="sequential")
    out, normaliser = call(q, k, v, *columns, scale=np.float32(scale))
    if sinks is not None:
        total = jnp.logaddexp(normaliser, sinks)
        out, normaliser = out * jnp.exp(normaliser - total)[..., None], total
    out, normaliser = (keep(x, ATTENTION) for x in (out, normaliser))
    return out, (q, k, v, sinks, columns, out, normaliser)


def _backward(
    scale: float, names: tuple[str, str], saved: tuple[Any, ...], g: jax.Array
) -> tuple[jax.Array | None, ...]:
    """As in `blocked`."""
    q, k, v, sinks, columns, out, normaliser = saved
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (q, k, v))
    call = jax.ffi.ffi_call(names[1], shapes, vmap_method="sequential")
    d_sinks = None if sinks is None else of_sinks(sinks, normaliser, jnp.sum(g * out, axis=-1), (0, 1))
    return *call(q, k, v, *columns, out, normaliser, g, scale=np.float32(scale)), d_sinks, None


_attention.defvjp(_forward, _backward)

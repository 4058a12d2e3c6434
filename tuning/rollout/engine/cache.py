"""Keys and values of the slots of an engine: their layout, and attention over them.

Axes: L layers, R slots, K key-value heads, A query heads a key-value head, H head size, S cached tokens (the
capacity), C new tokens, N query heads. A layer's cache is {"k": [R, K, H, S], "v": [R, K, S, H]}, so that both products
of attention read it as it lies; in int8 there are "k_scale" and "v_scale" [R, K, S] beside them, and of bfloat16 there
may be the bits (`_bits`). Layers are in stacks, with L in front: all in one where a loop runs over them, else each in
its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tuning.models.config import DecoderConfig
from tuning.models.decoder import AttentionSpec, soft_cap

KV = Literal["float32", "bfloat16", "float16", "int8"]
Layer = dict[str, jax.Array]
Stack = dict[str, jax.Array]
SLOT_AXIS = 1
"""Which axis of a stack's arrays counts slots."""
TOKEN_AXIS = {"k": 4, "v": 3, "k_scale": 3, "v_scale": 3}
"""Which axis of each of them counts tokens."""
WINDOW = 64
"""Most tokens that `insert` moves at a time."""


def token_bytes(config: DecoderConfig, kv: KV) -> int:
    """Bytes of one token's keys and values in all layers."""
    per_head = config.head_dim + 4 if kv == "int8" else config.head_dim * np.dtype(jnp.dtype(kv)).itemsize
    return 2 * config.num_layers * config.num_kv_heads * per_head


def make(config: DecoderConfig, slots: int, capacity: int, kv: KV, *, rolled: bool) -> list[Stack]:
    """Empty caches: one stack of all layers if `rolled`, else one a layer."""
    n, k, h = config.num_layers, config.num_kv_heads, config.head_dim

    def stack(layers: int) -> Stack:
        first = layers, slots, k
        kept = _bits(jnp.zeros((), kv)).dtype
        found = {"k": jnp.zeros((*first, h, capacity), kept), "v": jnp.zeros((*first, capacity, h), kept)}
        if kv == "int8":
            found |= {name: jnp.zeros((*first, capacity), jnp.float32) for name in ("k_scale", "v_scale")}
        return found

    return [stack(n)] if rolled else [stack(1) for _ in range(n)]


def _bits(x: jax.Array) -> jax.Array:
    """What is kept of these numbers: themselves; but XLA on CPU, to write a few of bfloat16, makes float32 of the whole
    array and back, so there it is their bits, as uint16."""
    as_bits = x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if as_bits else x


def _numbers(kept: jax.Array, dtype: Any) -> jax.Array:
    """The numbers that `_bits` kept, in this type."""
    x = jax.lax.bitcast_convert_type(kept, jnp.bfloat16) if kept.dtype == jnp.uint16 else kept
    return x.astype(dtype)


def make_like(cache: list[Stack], slots: int, tokens: int) -> list[Stack]:
    """Empty caches for the same layers, for these slots and tokens."""

    def one(name: str, x: jax.Array) -> jax.Array:
        shape = list(x.shape)
        shape[SLOT_AXIS], shape[TOKEN_AXIS[name]] = slots, tokens
        return jnp.zeros(shape, x.dtype)

    return [{n: one(n, x) for n, x in stack.items()} for stack in cache]


def capacity_of(cache: list[Stack]) -> int:
    """Tokens that a slot can hold."""
    return cache[0]["k"].shape[TOKEN_AXIS["k"]]


def layer_of(stack: Stack, number: jax.Array | int) -> Layer:
    """One layer of a stack."""
    return {n: x[number] for n, x in stack.items()}


def slot_of(stack: Stack, number: jax.Array | int, slot: jax.Array) -> Layer:
    """One layer of a stack, and one slot of it (R is 1)."""

    def one(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(x, [number, slot, *[0] * (x.ndim - 2)], (1, 1, *x.shape[2:]))[0]

    return {n: one(x) for n, x in stack.items()}


def write(stack: Stack, number: jax.Array | int, new: Layer, at: jax.Array | int) -> Stack:
    """The stack with new tokens of one layer from token `at` on, in all slots."""

    def one(name: str, whole: jax.Array) -> jax.Array:
        start: list[jax.Array | int] = [number, *[0] * (whole.ndim - 1)]
        start[TOKEN_AXIS[name]] = at
        return jax.lax.dynamic_update_slice(whole, new[name][None], start)

    return {n: one(n, x) for n, x in stack.items()}


def stored(k_RCKH: jax.Array, v_RCKH: jax.Array, kv: KV) -> Layer:
    """New keys and values in the layout and type of the cache, C in place of S."""
    k, v = jnp.transpose(k_RCKH, (0, 2, 3, 1)), jnp.transpose(v_RCKH, (0, 2, 1, 3))
    if kv != "int8":
        return {"k": _bits(k.astype(kv)), "v": _bits(v.astype(kv))}

    def coded(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
        scale = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axis, keepdims=True) / 127
        codes = jnp.round(x / jnp.where(scale > 0, scale, 1.0))
        return codes.astype(jnp.int8), jnp.squeeze(scale, axis)

    (k, k_scale), (v, v_scale) = coded(k, 2), coded(v, 3)
    return {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}


def attend(
    q_RCNH: jax.Array, parts: list[tuple[Layer, jax.Array]], spec: AttentionSpec, accumulate: Any = jnp.float32
) -> jax.Array:
    """Attention of C queries a row over cached parts, each with its mask [R, C, S of the part]; out [R, C, N, H]."""
    r, c, n, h = q_RCNH.shape
    heads = parts[0][0]["k"].shape[1]
    # One axis for the queries of a key head: with two, XLA on CPU copies the keys into another layout.
    q = q_RCNH.reshape(r, c, heads, n // heads, h).transpose(0, 2, 1, 3, 4).reshape(r, heads, -1, h)
    scores = []
    for part, mask in parts:
        s = jnp.einsum("rkqh,rkhs->rkqs", q, _numbers(part["k"], q.dtype), preferred_element_type=accumulate)
        if "k_scale" in part:
            s = s * part["k_scale"][:, :, None]
        s = soft_cap(s * spec.scale, spec.softcap).reshape(r, heads, c, -1, s.shape[-1])
        scores.append(jnp.where(mask[:, None, :, None], s, -1e30).reshape(r, heads, -1, s.shape[-1]))
    most = functools.reduce(jnp.maximum, [s.max(axis=-1, keepdims=True) for s in scores])
    out, norm = jnp.zeros((), accumulate), jnp.zeros((), accumulate)
    for s, (part, _) in zip(scores, parts, strict=True):
        w = jnp.exp(s - most)
        norm = norm + w.sum(axis=-1, keepdims=True)
        if "v_scale" in part:
            w = w * part["v_scale"][:, :, None]
        out = out + jnp.einsum(
            "rkqs,rksh->rkqh", w.astype(q.dtype), _numbers(part["v"], q.dtype), preferred_element_type=accumulate
        )
    out = (out / norm).astype(q.dtype).reshape(r, heads, c, -1, h)
    return out.transpose(0, 2, 1, 3, 4).reshape(r, c, n, h)


def near_enough(mask: jax.Array, query: jax.Array, key: jax.Array, spec: AttentionSpec) -> jax.Array:
    """The mask without keys that lie `window` positions or more before their query."""
    return mask if spec.window is None else mask & (query - key < spec.window)


def append(cache: list[Stack], new: list[Stack], at_R: jax.Array) -> list[Stack]:
    """Caches with each row's new tokens written from `at_R` on; there must be room for all of them."""

    def row(r: jax.Array, cache: list[Stack]) -> list[Stack]:
        def put(name: str, whole: jax.Array, part: jax.Array) -> jax.Array:
            start: list[jax.Array | int] = [0] * whole.ndim
            start[SLOT_AXIS], start[TOKEN_AXIS[name]] = r, at_R[r]
            return jax.lax.dynamic_update_slice(whole, jax.lax.dynamic_slice_in_dim(part, r, 1, SLOT_AXIS), start)

        return [{n: put(n, stack[n], near[n]) for n in stack} for stack, near in zip(cache, new, strict=True)]

    return jax.lax.fori_loop(0, at_R.shape[0], row, cache)


def insert(cache: list[Stack], chunk: list[Stack], entries: dict[str, jax.Array]) -> list[Stack]:
    """Caches with pieces of a chunk (one row) written into slots.

    Entry i of the first `entries["count"]` puts `tokens[i]` tokens of the chunk, at most `WINDOW`, from `start[i]` on,
    into slot `slot[i]` from cached token `at[i]` on.
    """
    capacity = capacity_of(cache)
    window = min(WINDOW, capacity)

    def widened(name: str, x: jax.Array) -> jax.Array:
        pads = [(0, 0)] * x.ndim
        pads[TOKEN_AXIS[name]] = (window, window)
        return jnp.pad(x, pads)

    wide = [{n: widened(n, x) for n, x in stack.items()} for stack in chunk]

    def entry(i: jax.Array, cache: list[Stack]) -> list[Stack]:
        slot, start, at, tokens = (entries[n][i] for n in ("slot", "start", "at", "tokens"))
        # A window at the end of a slot begins before its tokens.
        first = jnp.minimum(at, capacity - window)
        column = first + jnp.arange(window)
        mine = (column >= at) & (column < at + tokens)

        def put(name: str, whole: jax.Array, part: jax.Array) -> jax.Array:
            axis = TOKEN_AXIS[name]
            moved = jax.lax.dynamic_slice_in_dim(part, window + start - at + first, window, axis)
            where: list[jax.Array | int] = [0] * whole.ndim
            where[SLOT_AXIS], where[axis] = slot, first
            old = jax.lax.dynamic_slice(whole, where, moved.shape)
            shape = [1] * whole.ndim
            shape[axis] = window
            return jax.lax.dynamic_update_slice(whole, jnp.where(mine.reshape(shape), moved, old), where)

        return [{n: put(n, stack[n], part[n]) for n in stack} for stack, part in zip(cache, wide, strict=True)]

    return jax.lax.fori_loop(0, entries["count"], entry, cache)


@functools.partial(jax.jit, static_argnames=("axis", "capacity"))
def _resized(x: jax.Array, slots: jax.Array, axis: int, capacity: int) -> jax.Array:
    x = jnp.take(jax.lax.slice_in_dim(x, 0, min(capacity, x.shape[axis]), axis=axis), slots, axis=SLOT_AXIS)
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, capacity - x.shape[axis])
    return jnp.pad(x, pads)


def resize(cache: list[Stack], slots: Sequence[int], capacity: int) -> None:
    """Makes the caches those of the named slots, in this order, at another capacity; more tokens than fit are cut.

    In place and array by array: no more than the keys or the values of one stack are there twice.
    """
    numbers = jnp.asarray(slots, jnp.int32)
    for stack in cache:
        for name in stack:
            stack[name] = _resized(stack[name], numbers, TOKEN_AXIS[name], capacity)


@functools.partial(jax.jit, donate_argnames="cache")
def clone(cache: list[Stack], pairs_R2: jax.Array, count: jax.Array) -> list[Stack]:
    """Caches after the first `count` copies (source, target) of whole slots, one after the other."""

    def copy(i: jax.Array, x: jax.Array) -> jax.Array:
        moved = jax.lax.dynamic_slice_in_dim(x, pairs_R2[i, 0], 1, SLOT_AXIS)
        return jax.lax.dynamic_update_slice_in_dim(x, moved, pairs_R2[i, 1], SLOT_AXIS)

    return jax.lax.fori_loop(0, count, lambda i, cache: jax.tree.map(functools.partial(copy, i), cache), cache)

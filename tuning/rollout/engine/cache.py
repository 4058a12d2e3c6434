"""Keys and values of the slots of an engine: their layout, and attention over them.

Axes: L layers, R slots, K key-value heads, A query heads a key-value head, H head size, S cached tokens (the
capacity), C new tokens, N query heads. A layer's cache is {"k": [R, K, H, S], "v": [R, K, S, H]}: in this order both
products of attention read memory front to back, without a transposed copy. In int8 there are "k_scale" and "v_scale"
[R, K, S]; of a mixture "experts" [R, S, X], those that each token took. bfloat16 may be stored as its bits
(`_as_stored`). Layers are in stacks, with L in front: all in one where a loop runs over the layers, else each layer in
a stack of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Generic, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import AttentionSpec
from rlhf.tuning.models.experts import Routing
from rlhf.tuning.models.matmul import soft_cap
from rlhf.tuning.precision import item_bytes
from rlhf.tuning.rollout.engine.arrays import Array

KV = Literal["float32", "bfloat16", "float16", "int8"]
Layer = dict[str, jax.Array]
Stack = dict[str, jax.Array]
SLOT_AXIS = 1
"""The axis of a stack's arrays that counts slots."""
TOKEN_AXIS = {"k": 4, "v": 3, "k_scale": 3, "v_scale": 3, "experts": 2}
"""The axis of each array that counts tokens."""
WINDOW = 64
"""Most tokens that `insert` moves at a time."""


class Entries(NamedTuple, Generic[Array]):
    """Copies for `insert`, of at most `WINDOW` tokens each. Only the first `used` of the I entries count."""

    slot_I: Array
    """The slot to write."""
    start_I: Array
    """The first token in the chunk."""
    at_I: Array
    """Its place in the slot."""
    tokens_I: Array
    """How many tokens."""
    used: Array
    """Number of entries in use; the others are padding."""


def token_bytes(config: DecoderConfig, kv: KV) -> int:
    """Bytes of one token's keys and values in all layers."""
    # int8: one byte a number, and the float32 scale of the head.
    per_head = config.head_dim + 4 if kv == "int8" else config.head_dim * item_bytes(kv)
    experts = config.experts_per_token * np.dtype(config.expert_type).itemsize
    return config.num_layers * (2 * config.num_kv_heads * per_head + experts)


def make(config: DecoderConfig, slots: int, capacity: int, kv: KV, *, rolled: bool) -> list[Stack]:
    """Empty caches: one stack of all layers if `rolled`, else one a layer."""
    n, k, h = config.num_layers, config.num_kv_heads, config.head_dim

    def stack(layers: int) -> Stack:
        first = layers, slots, k
        dtype = _as_stored(jnp.zeros((), kv)).dtype
        arrays = {"k": jnp.zeros((*first, h, capacity), dtype), "v": jnp.zeros((*first, capacity, h), dtype)}
        if kv == "int8":
            arrays |= {name: jnp.zeros((*first, capacity), jnp.float32) for name in ("k_scale", "v_scale")}
        if config.num_experts:
            arrays["experts"] = jnp.zeros((layers, slots, capacity, config.experts_per_token), config.expert_type)
        return arrays

    return [stack(n)] if rolled else [stack(1) for _ in range(n)]


def _as_stored(x: jax.Array) -> jax.Array:
    """The array as the cache stores it. On CPU bfloat16 is stored as its uint16 bits: to write a few elements, XLA
    would convert the whole cache to float32 and back."""
    as_bits = x.dtype == jnp.bfloat16 and target_platform() == "cpu"
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if as_bits else x


def _from_stored(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The inverse of `_as_stored`, in `dtype`."""
    numbers = jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
    return numbers.astype(dtype)


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
    """The stack with new tokens of one layer, in the arrays that `new` has, from token `at` on, in all slots."""

    def one(name: str, x: jax.Array) -> jax.Array:
        start: list[jax.Array | int] = [number, *[0] * (x.ndim - 1)]
        start[TOKEN_AXIS[name]] = at
        return jax.lax.dynamic_update_slice(x, new[name][None], start)

    return {n: one(n, x) if n in new else x for n, x in stack.items()}


def writing(at: jax.Array | int) -> Routing:
    """The routing of an engine: it takes the chosen experts, and writes them to the new tokens' cache from `at` on."""

    def routing(_: jax.Array, chosen: jax.Array, mine: Any) -> tuple[jax.Array, Any]:
        far, near, number = mine
        new = {"experts": chosen.astype(near["experts"].dtype)}
        return chosen, (far, write(near, number, new, at), number)

    return routing


def experts_of(cache: list[Stack], slot: int, tokens: int) -> bytes:
    """The experts of the first tokens of a slot, [tokens, layers, X] of `DecoderConfig.expert_type`, as bytes."""
    # The number is an argument: each constant would be another program.
    one = (jax.lax.dynamic_index_in_dim(stack["experts"], np.int32(slot), SLOT_AXIS, False) for stack in cache)
    return np.concatenate([np.asarray(x) for x in one])[:, :tokens].swapaxes(0, 1).tobytes()


def stored(k_RCKH: jax.Array, v_RCKH: jax.Array, kv: KV) -> Layer:
    """New keys and values in the layout and type of the cache, with C in place of S."""
    k, v = jnp.transpose(k_RCKH, (0, 2, 3, 1)), jnp.transpose(v_RCKH, (0, 2, 1, 3))
    if kv != "int8":
        return {"k": _as_stored(k.astype(kv)), "v": _as_stored(v.astype(kv))}

    k_codes, k_scale = encode(k, 2)
    v_codes, v_scale = encode(v, 3)
    return {"k": k_codes, "v": v_codes, "k_scale": k_scale, "v_scale": v_scale}


def encode(x: jax.Array, head_axis: int) -> tuple[jax.Array, jax.Array]:
    """int8 codes x / scale, rounded, with one float32 scale = max |x| / 127 for the H numbers of a token's head."""
    scale = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=head_axis, keepdims=True) / 127
    # A head of zeros has scale 0 and codes 0.
    codes = jnp.round(x / jnp.where(scale > 0, scale, 1.0))
    return codes.astype(jnp.int8), jnp.squeeze(scale, head_axis)


def attend(
    q_RCNH: jax.Array,
    parts: list[tuple[Layer, jax.Array]],
    spec: AttentionSpec,
    accumulate: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Attention of C queries a row over cached parts, each with its mask [R, C, S of the part]; out [R, C, N, H].

    One softmax over all parts: each has its logits, they share the maximum and the sum of exponentials. So the parts
    need no concatenation, which would copy the cache. Scales of int8 are applied to logits and weights, A C S numbers a
    head, rather than to keys and values.
    """
    r, c, n, h = q_RCNH.shape
    heads = parts[0][0]["k"].shape[1]
    # One axis for the queries of a key head: with two, XLA on CPU copies the keys into another layout.
    q = q_RCNH.reshape(r, c, heads, n // heads, h).transpose(0, 2, 1, 3, 4).reshape(r, heads, -1, h)
    logits: list[jax.Array] = []
    # XLA for GPUs joins products that share a factor: it would copy the keys of all parts into one array.
    apart = jax.lax.optimization_barrier if target_platform() == "gpu" else lambda q: q
    for part, mask in parts:
        k = _from_stored(part["k"], q.dtype)
        z = jnp.einsum("rkqh,rkhs->rkqs", apart(q) if logits else q, k, preferred_element_type=accumulate)
        if "k_scale" in part:
            z = z * part["k_scale"][:, :, None]
        z = soft_cap(z * spec.scale, spec.softcap).reshape(r, heads, c, -1, z.shape[-1])
        # Not -inf: a row that sees nothing (padding, an empty slot) would become NaN.
        logits.append(jnp.where(mask[:, None, :, None], z, -1e30).reshape(r, heads, -1, z.shape[-1]))
    tops = [z.max(axis=-1, keepdims=True) for z in logits]
    if spec.sinks_N is not None:
        each = spec.sinks_N.astype(accumulate).reshape(1, heads, 1, -1)
        tops.append(jnp.broadcast_to(each, (r, heads, c, n // heads)).reshape(tops[0].shape))
    most = functools.reduce(jnp.maximum, tops)
    out, norm = jnp.zeros((), accumulate), jnp.zeros((), accumulate)
    if spec.sinks_N is not None:
        norm = jnp.exp(tops[-1] - most)
    for z, (part, _) in zip(logits, parts, strict=True):
        weights = jnp.exp(z - most)
        # The norm is of the weights alone: the scales below belong to the values.
        norm = norm + weights.sum(axis=-1, keepdims=True)
        if "v_scale" in part:
            weights = weights * part["v_scale"][:, :, None]
        v = _from_stored(part["v"], q.dtype)
        out = out + jnp.einsum("rkqs,rksh->rkqh", weights.astype(q.dtype), v, preferred_element_type=accumulate)
    # Divided once, after the products: H numbers a query instead of S weights.
    out = (out / norm).astype(q.dtype).reshape(r, heads, c, -1, h)
    return out.transpose(0, 2, 1, 3, 4).reshape(r, c, n, h)


def within_window(mask: jax.Array, query: jax.Array, key: jax.Array, spec: AttentionSpec) -> jax.Array:
    """The mask without keys that are `window` positions or more before their query."""
    return mask if spec.window is None else mask & (query - key < spec.window)


def append(cache: list[Stack], new: list[Stack], at_R: jax.Array) -> list[Stack]:
    """Caches with each row's new tokens written from `at_R` on; `new` is of the same layers and slots.

    All tokens of `new` are written, also those after a row's end: the host does not count them as held. There must be
    room for them, since `dynamic_update_slice` would otherwise shift the write to the left, over tokens that count.
    """

    def append_row(turn: jax.Array, cache: list[Stack]) -> list[Stack]:
        r = rows_R[turn]

        def put(name: str, x: jax.Array, new: jax.Array) -> jax.Array:
            start: list[jax.Array | int] = [0] * x.ndim
            start[SLOT_AXIS], start[TOKEN_AXIS[name]] = r, at_R[r]
            new_of_row = jax.lax.dynamic_slice_in_dim(new, r, 1, SLOT_AXIS)
            return jax.lax.dynamic_update_slice(x, new_of_row, start)

        return [{n: put(n, stack[n], near[n]) for n in stack} for stack, near in zip(cache, new, strict=True)]

    if target_platform() == "gpu":
        return [
            {n: _put_at(x, near[n], at_R, TOKEN_AXIS[n]) for n, x in stack.items()}
            for stack, near in zip(cache, new, strict=True)
        ]
    # TPU compilers (libtpu 0.0.42) take a loop that writes at its own counter for one that overwrites the whole array.
    rows_R = jax.lax.optimization_barrier(jnp.arange(at_R.shape[0]))
    # Row by row, as each has its own place; the loop updates the caches in place.
    return jax.lax.fori_loop(0, at_R.shape[0], append_row, cache)


def _put_at(x: jax.Array, new: jax.Array, at_R: jax.Array, axis: int) -> jax.Array:
    """Write each slot's new tokens from `at_R` on into an array of a stack, as one scatter: one kernel of a GPU.

    Every axis before that of tokens is one of places. XLA would bring the axis of slots to the front, with a copy. On
    CPUs a scatter takes two to four times as long as the loop over rows.
    """
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    for _ in range(axis):
        put = jax.vmap(put)
    at = at_R.reshape(-1, *[1] * (axis - SLOT_AXIS - 1))
    return put(x, new, jnp.broadcast_to(at, x.shape[:axis]))


def insert(cache: list[Stack], chunk: list[Stack], entries: Entries[jax.Array]) -> list[Stack]:
    """Caches with pieces of a chunk (one row) written into slots, as `entries` say.

    Every entry moves a window of the same number of tokens, whatever its own number is, since shapes are fixed: it
    reads what the slot holds there, replaces its own tokens and writes all of it back.

        slot            a b c d e f g h i j
        chunk               p q r s t
        entry           start 1, at 3, 2 tokens: q r
        window of 4           d e f g  ->  q r f g
        slot after      a b c q r f g h i j
    """
    capacity = capacity_of(cache)
    window = min(WINDOW, capacity)

    def padded(name: str, x: jax.Array) -> jax.Array:
        pads = [(0, 0)] * x.ndim
        pads[TOKEN_AXIS[name]] = (window, window)
        return jnp.pad(x, pads)

    # A window may reach over either end of the chunk.
    wide = [{n: padded(n, x) for n, x in stack.items()} for stack in chunk]

    def insert_entry(i: jax.Array, cache: list[Stack]) -> list[Stack]:
        slot, start, at, tokens = (x[i] for x in (entries.slot_I, entries.start_I, entries.at_I, entries.tokens_I))
        # A window at the end of a slot begins before the entry's tokens.
        first = jnp.minimum(at, capacity - window)
        column = first + jnp.arange(window)
        covered = (column >= at) & (column < at + tokens)

        def put(name: str, x: jax.Array, chunk: jax.Array) -> jax.Array:
            axis = TOKEN_AXIS[name]
            new = jax.lax.dynamic_slice_in_dim(chunk, window + start - at + first, window, axis)
            where: list[jax.Array | int] = [0] * x.ndim
            where[SLOT_AXIS], where[axis] = slot, first
            old = jax.lax.dynamic_slice(x, where, new.shape)
            shape = [1] * x.ndim
            shape[axis] = window
            return jax.lax.dynamic_update_slice(x, jnp.where(covered.reshape(shape), new, old), where)

        return [{n: put(n, stack[n], part[n]) for n in stack} for stack, part in zip(cache, wide, strict=True)]

    return jax.lax.fori_loop(0, entries.used, insert_entry, cache)


@functools.partial(jax.jit, static_argnames=("axis", "capacity"))
def _resized(x: jax.Array, slots: jax.Array, axis: int, capacity: int) -> jax.Array:
    # Shortened first, so that the gather copies no token that is dropped.
    x = jnp.take(jax.lax.slice_in_dim(x, 0, min(capacity, x.shape[axis]), axis=axis), slots, axis=SLOT_AXIS)
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, capacity - x.shape[axis])
    return jnp.pad(x, pads)


def resize(cache: list[Stack], slots: Sequence[int], capacity: int) -> None:
    """Changes the caches, in place, to those of the listed slots in this order, at another capacity; tokens beyond the
    capacity are dropped.

    Array by array: at most the keys or the values of one stack are in memory twice.
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

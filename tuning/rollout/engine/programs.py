"""The programs of an engine: prefill of a chunk of prompt tokens, a run of decoding steps, and the scores of a prompt.

Prompts are prefilled without their last token; it is the first that decoding feeds, so that all sampling happens in
one place. Axes as in `cache`: R slots, S cached tokens, C tokens of a chunk, T steps of a run, E stop ids,
V vocabulary.

A run of decoding does not write to the slots' caches while it goes. New keys and values go into a small cache of their
own, T tokens long, which `append` moves after each slot's tokens at the end: attention sees both parts, and XLA need
not copy the large one in every step.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Generic, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from rlhf.tuning.cpu.kernels import Kernels
from rlhf.tuning.models.decoder import AttentionSpec
from rlhf.tuning.rollout.engine.arrays import Array
from rlhf.tuning.rollout.engine.cache import (
    KV,
    WINDOW,
    Entries,
    Layer,
    Stack,
    append,
    attend,
    capacity_of,
    insert,
    layer_of,
    make_like,
    slot_of,
    stored,
    within_window,
    write,
    writing,
)
from rlhf.tuning.rollout.engine.cpu import attention as cpu_attention
from rlhf.tuning.rollout.engine.rows import Decoded, Rows, decode_steps

Prefixed = Literal["none", "one", "many"]
"""Which pieces of a chunk continue what their slots hold: none, the first alone, or any."""
ABREAST = 8
"""Windows of pieces that `_attend_pieces` computes at a time."""
SCORED = 32
"""Largest number of positions for which `score` holds logits at a time."""


class Chunk(NamedTuple, Generic[Array]):
    """Tokens of one or more prompts to prefill (`slots.pack` draws one)."""

    tokens_C: Array
    positions_C: Array
    group_C: Array
    """Which piece a token belongs to, 1, 2, ...; 0 is padding."""
    start_C: Array
    """The first token of its piece in the chunk."""
    slot_C: Array
    """The slot of its piece."""
    entries: Entries[Array]
    """Where the pieces go."""


@functools.partial(jax.jit, static_argnames=("graph", "prefixed", "kv", "dtype", "kernels"), donate_argnames="cache")
def prefill(
    graph: Any,
    weights: Any,
    cache: list[Stack],
    chunk: Chunk[jax.Array],
    *,
    prefixed: Prefixed,
    kv: KV,
    dtype: str,
    kernels: Kernels,
) -> list[Stack]:
    """The caches with those of a chunk of prompts, some of which may continue what their slots hold."""
    model = nnx.merge(graph, weights)
    model.target = kernels.products
    _, new = _forward(model, cache, chunk, prefixed, kv, dtype, kernels.attention)
    return insert(cache, new, chunk.entries)


def _forward(
    model: Any,
    cache: list[Stack],
    chunk: Chunk[jax.Array],
    prefixed: Prefixed,
    kv: KV,
    dtype: str,
    kernel: str | None,
) -> tuple[jax.Array, list[Stack]]:
    """(hidden states [1, C, D], keys and values) of a chunk of prompts."""
    tokens, positions, group = (x[None] for x in (chunk.tokens_C, chunk.positions_C, chunk.group_C))
    length = tokens.shape[1]
    place_C = jnp.arange(length)
    # Tokens that its slot holds before a piece.
    before_C = jnp.where(chunk.group_C > 0, chunk.positions_C + chunk.start_C - place_C, 0)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, mine: Any) -> tuple[jax.Array, Any]:
        far, near, number = mine
        new = stored(k, v, kv)
        near = write(near, number, new, 0)
        if prefixed != "none" and kernel:
            spans = cpu_attention.Spans(chunk.slot_C, before_C, jnp.zeros_like(place_C), chunk.start_C, place_C + 1)
            out = cpu_attention.attend(kernel, q[0], far, near, number, spans, chunk.positions_C, spec)
            return out[None], (far, near, number)
        query, key = positions[:, :, None], positions[:, None]
        # Within a group the order of the chunk is the order of positions, so the chunk index is enough.
        causal = (group[:, :, None] == group[:, None]) & (place_C[:, None] >= place_C)
        parts = [(new, within_window(causal, query, key, spec))]
        cached = jnp.arange(capacity_of(cache))[None, None]
        if prefixed == "one":
            before = cached < before_C[None, :, None]
            prefix = slot_of(far, number, chunk.slot_C[0])
            parts.append((prefix, within_window(before, query, cached, spec)))
        if prefixed != "many":
            return attend(q, parts, spec), (far, near, number)
        return _attend_pieces(q, new, layer_of(far, number), chunk, before_C, spec), (far, near, number)

    empty = make_like(cache, 1, length)
    hidden, new = model(
        tokens,
        positions,
        attention,
        live_BL=group > 0,
        cache=cache,
        new=empty,
        dtype=jnp.dtype(dtype),
        routing=writing(0),
    )
    return hidden, new


def _attend_pieces(
    q_1CNH: jax.Array, new: Layer, far: Layer, chunk: Chunk[jax.Array], before_C: jax.Array, spec: AttentionSpec
) -> jax.Array:
    """Attention of a chunk [1, C, N, H] with pieces that continue different slots. Out [1, C, N, H].

    A row for each window of a piece, with a copy of its slot's keys and values; `ABREAST` of them at a time, and no
    more than there are pieces for, so that neither memory nor work grows with the number of slots.
    """
    length, place = q_1CNH.shape[1], jnp.arange(q_1CNH.shape[1])
    cached = jnp.arange(far["v"].shape[2])
    entries = len(chunk.entries.slot_I)

    def some(number: jax.Array, out: jax.Array) -> jax.Array:
        wanted = number * ABREAST + jnp.arange(ABREAST)
        slot, start, count = (
            x[jnp.minimum(wanted, entries - 1)]
            for x in (chunk.entries.slot_I, chunk.entries.start_I, chunk.entries.tokens_I)
        )
        place_IW = start[:, None] + jnp.arange(WINDOW)
        # Entries that are not used, and windows after their piece's end, see nothing and are dropped below.
        mine_IW = (wanted < chunk.entries.used)[:, None] & (jnp.arange(WINDOW) < count[:, None])
        taken_IW = jnp.minimum(place_IW, length - 1)
        position_IW, start_IW, before_IW = (
            x[taken_IW][:, :, None] for x in (chunk.positions_C, chunk.start_C, before_C)
        )
        older = mine_IW[:, :, None] & (cached < before_IW)
        newer = mine_IW[:, :, None] & (place >= start_IW) & (place <= taken_IW[:, :, None])
        parts = [
            ({n: x[slot] for n, x in far.items()}, within_window(older, position_IW, cached, spec)),
            (
                {n: jnp.broadcast_to(x, (ABREAST, *x.shape[1:])) for n, x in new.items()},
                within_window(newer, position_IW, chunk.positions_C, spec),
            ),
        ]
        found = attend(q_1CNH[0][taken_IW], parts, spec)
        # Index C is out of range: such updates are dropped.
        flat = jnp.where(mine_IW, place_IW, length).reshape(-1)
        return out.at[flat].set(found.reshape(-1, *found.shape[2:]), mode="drop")

    blocks = (chunk.entries.used + ABREAST - 1) // ABREAST
    return jax.lax.fori_loop(0, blocks, some, jnp.zeros_like(q_1CNH[0]))[None]


@functools.partial(jax.jit, static_argnames=("graph", "top", "kv", "dtype", "kernels"), donate_argnames="cache")
def score(
    graph: Any,
    weights: Any,
    cache: list[Stack],
    chunk: Chunk[jax.Array],
    next_C: jax.Array,
    *,
    top: int,
    kv: KV,
    dtype: str,
    kernels: Kernels,
) -> tuple[list[Stack], jax.Array, jax.Array, jax.Array]:
    """(caches, log-probabilities [C] of the tokens `next_C` after those of a chunk, the `top` most probable ids and
    log-probabilities [C, top]), at temperature 1.

    The chunk continues what its slot holds before position `positions_C[0]`.
    """
    model = nnx.merge(graph, weights)
    model.target = kernels.products
    hidden, new = _forward(model, cache, chunk, "one", kv, dtype, None)

    def of_block(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        hidden_RD, next_R = block
        # As `sample` computes them at temperature 1.
        logits = model.logits(hidden_RD).astype(jnp.float32)
        norm_R = jax.nn.logsumexp(logits, axis=-1)
        values, ids = jax.lax.top_k(logits, top)
        chosen_R = jnp.take_along_axis(logits, next_R[:, None], axis=-1)[:, 0]
        return chosen_R - norm_R, ids.astype(jnp.int32), values - norm_R[:, None]

    # Logits of a block of positions at a time: those of a whole chunk would take V numbers a token.
    size = math.gcd(len(next_C), SCORED)
    blocks = hidden[0].reshape(-1, size, hidden.shape[-1]), next_C.reshape(-1, size)
    logps, ids, best = jax.lax.map(of_block, blocks)
    shape = len(next_C), top
    return insert(cache, new, chunk.entries), logps.reshape(-1), ids.reshape(shape), best.reshape(shape)


@functools.partial(
    jax.jit, static_argnames=("graph", "steps", "top", "kv", "dtype", "kernels"), donate_argnames="cache"
)
def decode(
    graph: Any,
    weights: Any,
    cache: list[Stack],
    rows: Rows[jax.Array],
    wake: jax.Array,
    most: jax.Array,
    *,
    steps: int,
    top: int,
    kv: KV,
    dtype: str,
    kernels: Kernels,
) -> tuple[list[Stack], Decoded[jax.Array]]:
    """As `decode_steps`, for slots. Rows that are not live are computed too, since shapes are fixed."""
    model = nnx.merge(graph, weights)
    model.target = kernels.products

    def feed(token_R: jax.Array, t: jax.Array, live_R: jax.Array, near: list[Stack]) -> Any:
        attention = functools.partial(
            _attend_step, length_R=rows.length_R, t=t, live_R=live_R, steps=steps, kv=kv, kernel=kernels.attention
        )
        hidden, near = model(
            token_R[:, None],
            (rows.length_R + t)[:, None],
            attention,
            live_BL=live_R[:, None],
            cache=cache,
            new=near,
            dtype=jnp.dtype(dtype),
            routing=writing(t),
        )
        return hidden[:, 0], near

    near = make_like(cache, len(rows.token_R), steps)
    near, decoded = decode_steps(model, rows, near, feed, steps=steps, top=top, wake=wake, most=most)
    return append(cache, near, rows.length_R), decoded


def _attend_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spec: AttentionSpec,
    mine: tuple[Stack, Stack, jax.Array | int],
    *,
    length_R: jax.Array,
    t: jax.Array,
    live_R: jax.Array,
    steps: int,
    kv: KV,
    kernel: str | None,
) -> tuple[jax.Array, tuple[Stack, Stack, jax.Array | int]]:
    """Attention of one query a row, over the `length_R` cached tokens and those of this run up to step `t`.

    `mine` is (stack of the slots' cache, stack of this run's, number of the layer in both).
    """
    far, near, number = mine
    near = write(near, number, stored(k, v, kv), t)
    if kernel:
        spans = cpu_attention.of_step(length_R, live_R, t)
        out = cpu_attention.attend(kernel, q[:, 0], far, near, number, spans, length_R + t, spec)
        return out[:, None], (far, near, number)
    query = (length_R + t)[:, None, None]
    cached = jnp.arange(capacity_of([far]))
    older = (cached < length_R[:, None])[:, None]
    # Of this run's `steps` places those up to step t are written.
    newer = jnp.broadcast_to(jnp.arange(steps) <= t, (len(length_R), 1, steps))
    key_of_newer = length_R[:, None, None] + jnp.arange(steps)
    parts = [
        (layer_of(far, number), within_window(older, query, cached, spec)),
        (layer_of(near, number), within_window(newer, query, key_of_newer, spec)),
    ]
    return attend(q, parts, spec), (far, near, number)

"""The programs of an engine: prefill of a chunk of prompt tokens, a run of decoding steps, and the scores of a prompt.

Prompts are prefilled without their last token; it is the first that decoding feeds, so that all sampling happens in
one place. Axes as in `cache`: R slots, S cached tokens, C tokens of a chunk, T steps of a run, E stop ids,
V vocabulary.

A run of decoding does not write to the slots' caches while it goes. New keys and values go into a small cache of their
own, T tokens long, which `append` moves behind each slot's tokens at the end: attention sees both parts, and XLA need
not copy the large one in every step.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Generic, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tuning.models.decoder import AttentionSpec
from tuning.rollout.engine.arrays import Array
from tuning.rollout.engine.cache import (
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
)
from tuning.rollout.engine.cpu import attention as cpu_attention
from tuning.rollout.engine.cpu.kernels import Kernels
from tuning.rollout.engine.sampling import Controls, sample, uniforms

Prefixed = Literal["none", "one", "many"]
"""Which pieces of a chunk continue what their slots hold: none, the first alone, or any."""
SCORED = 32
"""Positions whose logits `score` holds at a time, at most."""


class State(NamedTuple):
    """The arrays that the programs update. They are donated: after a call only its result is valid."""

    cache: list[Stack]
    seen_RV: jax.Array
    """Tokens of a slot's prompt and completion, which a repetition penalty applies to; bool."""


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


class Rows(NamedTuple, Generic[Array]):
    """The start of a run of decoding, one entry a slot."""

    token_R: Array
    """To feed: the newest token, whose keys and values are not cached yet."""
    length_R: Array
    """Cached tokens before it."""
    left_R: Array
    """Tokens that the completion may still get."""
    made_R: Array
    """Tokens that it has: the place of the next one in its random stream."""
    live_R: Array
    """Whether the slot decodes; bool."""
    key_R2: Array
    """Key data of the sample."""
    stops_RE: Array
    """Token ids that end the completion, padded with -1."""
    controls: Controls[Array]


class Decoded(NamedTuple, Generic[Array]):
    """The tokens of a run of decoding. Of row r only the first `made_R[r]` count."""

    tokens_RT: Array
    logps_RT: Array
    top_ids_RTN: Array
    """N most probable ids at each token; N may be 0."""
    top_logps_RTN: Array
    made_R: Array
    live_R: Array
    """Whether the completion goes on."""


class _Loop(NamedTuple):
    """The state of the decoding loop."""

    t: jax.Array
    """Steps done."""
    token_R: jax.Array
    near: list[Stack]
    """Keys and values of this run, T tokens a row."""
    seen_RV: jax.Array
    out: Decoded[jax.Array]


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
    hidden, new = model(tokens, positions, attention, live_BL=group > 0, cache=cache, new=empty, dtype=jnp.dtype(dtype))
    return hidden, new


def _attend_pieces(
    q_1CNH: jax.Array, new: Layer, far: Layer, chunk: Chunk[jax.Array], before_C: jax.Array, spec: AttentionSpec
) -> jax.Array:
    """Attention of a chunk [1, C, N, H] whose pieces continue slots of their own: a row for each window of a piece,
    with a copy of its slot's keys and values. Out [1, C, N, H]."""
    entries, length = chunk.entries, q_1CNH.shape[1]
    # Windows behind the end of the chunk, and entries that are not used, see nothing and are dropped below.
    place_IW = entries.start_I[:, None] + jnp.arange(WINDOW)
    mine_IW = (jnp.arange(WINDOW) < entries.tokens_I[:, None]) & (jnp.arange(len(entries.slot_I)) < entries.used)[
        :, None
    ]
    taken_IW = jnp.minimum(place_IW, length - 1)
    position_IW, start_IW, before_IW = (x[taken_IW][:, :, None] for x in (chunk.positions_C, chunk.start_C, before_C))
    cached, place = jnp.arange(far["v"].shape[2]), jnp.arange(length)
    older = mine_IW[:, :, None] & (cached < before_IW)
    newer = mine_IW[:, :, None] & (place >= start_IW) & (place <= taken_IW[:, :, None])
    rows = len(entries.slot_I)
    parts = [
        ({n: x[entries.slot_I] for n, x in far.items()}, within_window(older, position_IW, cached, spec)),
        (
            {n: jnp.broadcast_to(x, (rows, *x.shape[1:])) for n, x in new.items()},
            within_window(newer, position_IW, chunk.positions_C, spec),
        ),
    ]
    out = attend(q_1CNH[0][taken_IW], parts, spec)
    flat = jnp.where(mine_IW, place_IW, length).reshape(-1)
    whole = jnp.zeros((length + 1, *q_1CNH.shape[2:]), q_1CNH.dtype)
    return whole.at[flat].set(out.reshape(-1, *out.shape[2:]))[None, :length]


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
    """(caches, log-probabilities [C] of the tokens `next_C` behind those of a chunk, the `top` most probable ids and
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
    return insert(cache, new, chunk.entries), logps.reshape(-1), ids.reshape(-1, top), best.reshape(-1, top)


@functools.partial(
    jax.jit, static_argnames=("graph", "steps", "top", "kv", "dtype", "kernels"), donate_argnames="state"
)
def decode(
    graph: Any,
    weights: Any,
    state: State,
    rows: Rows[jax.Array],
    wake: jax.Array,
    most: jax.Array,
    *,
    steps: int,
    top: int,
    kv: KV,
    dtype: str,
    kernels: Kernels,
) -> tuple[State, Decoded[jax.Array]]:
    """Up to `steps` tokens of every live row, and no more than `most`.

    Ends early when no row is live, or when `wake` rows have ended in this run. Rows that are not live are computed
    too, since shapes are fixed; their results are discarded.
    """
    model = nnx.merge(graph, weights)
    model.target = kernels.products
    penalised = jnp.any(rows.controls.repetition_penalty_R != 1)

    def running(loop: _Loop) -> jax.Array:
        # `most` and `wake` are arrays, not static: their values compile nothing.
        ended = jnp.sum(rows.live_R) - jnp.sum(loop.out.live_R)
        return (loop.t < jnp.minimum(steps, most)) & jnp.any(loop.out.live_R) & (ended < wake)

    def step(loop: _Loop) -> _Loop:
        t, token_R, out = loop.t, loop.token_R, loop.out
        attention = functools.partial(
            _attend_step, length_R=rows.length_R, t=t, live_R=out.live_R, steps=steps, kv=kv, kernel=kernels.attention
        )
        hidden, near = model(
            token_R[:, None],
            (rows.length_R + t)[:, None],
            attention,
            live_BL=out.live_R[:, None],
            cache=state.cache,
            new=loop.near,
            dtype=jnp.dtype(dtype),
        )
        each = jnp.arange(len(token_R))
        # Without a penalty in any row nothing reads `seen_RV`, and the update would copy it.
        seen_RV = jax.lax.cond(penalised, lambda x: x.at[each, token_R].set(True), lambda x: x, loop.seen_RV)
        # A draw depends on the sample's key and the token's number, not on the slot or the run (R15).
        uniform_R = uniforms(rows.key_R2, rows.made_R + t)
        token_R, logp_R, (top_ids, top_logps) = sample(
            model.logits(hidden[:, 0]), uniform_R, rows.controls, seen_RV, top
        )
        # A row that has ended still writes tokens below; its count stands still, so they are not read.
        made_R = out.made_R + out.live_R
        ended_R = jnp.any(token_R[:, None] == rows.stops_RE, axis=-1) | (made_R >= rows.left_R)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=t, axis=1)
        decoded = Decoded(
            tokens_RT=put(out.tokens_RT, token_R[:, None]),
            logps_RT=put(out.logps_RT, logp_R[:, None]),
            top_ids_RTN=put(out.top_ids_RTN, top_ids[:, None]),
            top_logps_RTN=put(out.top_logps_RTN, top_logps[:, None]),
            made_R=made_R,
            live_R=out.live_R & ~ended_R,
        )
        return _Loop(t + 1, token_R, near, seen_RV, decoded)

    loop = jax.lax.while_loop(running, step, _before_first_step(state, rows, steps, top))
    return State(append(state.cache, loop.near, rows.length_R), loop.seen_RV), loop.out


def _before_first_step(state: State, rows: Rows[jax.Array], steps: int, top: int) -> _Loop:
    count = len(rows.token_R)
    nothing = Decoded(
        tokens_RT=jnp.zeros((count, steps), jnp.int32),
        logps_RT=jnp.zeros((count, steps), jnp.float32),
        top_ids_RTN=jnp.zeros((count, steps, top), jnp.int32),
        top_logps_RTN=jnp.zeros((count, steps, top), jnp.float32),
        made_R=jnp.zeros(count, jnp.int32),
        live_R=rows.live_R,
    )
    return _Loop(jnp.asarray(0), rows.token_R, make_like(state.cache, count, steps), state.seen_RV, nothing)


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


@functools.partial(jax.jit, donate_argnames="seen_RV")
def mark(seen_RV: jax.Array, slot: jax.Array, row_V: jax.Array) -> jax.Array:
    """`seen_RV` with `row_V` in the place of one slot."""
    return jax.lax.dynamic_update_slice_in_dim(seen_RV, row_V[None], slot, 0)

"""The two programs of an engine: prefill of a chunk of prompt tokens, and a run of decoding steps.

Prompts are prefilled without their last token; it is the first that decoding feeds, so that all sampling happens in
one place. Axes as in `cache`: R slots, S cached tokens, C tokens of a chunk, T steps of a run.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tuning.models.decoder import AttentionSpec
from tuning.rollout.engine.cache import (
    KV,
    Stack,
    append,
    attend,
    capacity_of,
    insert,
    layer_of,
    make_like,
    near_enough,
    slot_of,
    stored,
    write,
)
from tuning.rollout.engine.cpu import attention as cpu_attention
from tuning.rollout.engine.cpu.kernels import Kernels
from tuning.rollout.engine.sampling import sample, uniforms

State = dict[str, Any]
"""{"cache": as `cache.make` gives it, "seen": [R, V] bool, the tokens that a repetition penalty concerns}; donated."""


@functools.partial(jax.jit, static_argnames=("graph", "prefixed", "kv", "dtype", "kernels"), donate_argnames="cache")
def prefill(
    graph: Any,
    weights: Any,
    cache: list[Stack],
    chunk: dict[str, Any],
    *,
    prefixed: bool,
    kv: KV,
    dtype: str,
    kernels: Kernels,
) -> list[Stack]:
    """The caches with those of a chunk of prompts.

    `chunk` has `tokens`, `positions` and `group` [C] (prompts 1, 2, ..., 0 is padding) and `entries` for `insert`.
    With `prefixed` the first prompt goes on behind the tokens that slot `prefix_slot` holds before position
    `positions[0]`.
    """
    model = nnx.merge(graph, weights)
    model.target = kernels.products
    tokens, positions, group = (chunk[n][None] for n in ("tokens", "positions", "group"))
    length = tokens.shape[1]

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, mine: Any) -> tuple[jax.Array, Any]:
        far, near, number = mine
        new = stored(k, v, kv)
        query, key = positions[:, :, None], positions[:, None]
        causal = (group[:, :, None] == group[:, None]) & (jnp.arange(length)[:, None] >= jnp.arange(length))
        parts = [(new, near_enough(causal, query, key, spec))]
        if prefixed:
            cached = jnp.arange(capacity_of(cache))[None, None]
            before = (group[:, :, None] == 1) & (cached < positions[0, 0])
            prefix = slot_of(far, number, chunk["prefix_slot"])
            parts.append((prefix, near_enough(before, query, cached, spec)))
        return attend(q, parts, spec), (far, write(near, number, new, 0), number)

    empty = make_like(cache, 1, length)
    _, new = model(tokens, positions, attention, live_BL=group > 0, cache=cache, new=empty, dtype=jnp.dtype(dtype))
    return insert(cache, new, chunk["entries"])


@functools.partial(
    jax.jit, static_argnames=("graph", "steps", "top", "kv", "dtype", "kernels"), donate_argnames="state"
)
def decode(
    graph: Any,
    weights: Any,
    state: State,
    rows: dict[str, jax.Array],
    wake: jax.Array,
    most: jax.Array,
    *,
    steps: int,
    top: int,
    kv: KV,
    dtype: str,
    kernels: Kernels,
) -> tuple[State, dict[str, jax.Array]]:
    """Up to `steps` tokens of every live row, and no more than `most`.

    Ends early when no row is live, or `wake` have ended in this run.

    `rows` has, [R] each: `token` to feed, `length` of the cache before it, `left` tokens to make, `made` tokens,
    `live`, `key` [R, 2], `stops` [R, E] (padded with -1) and the fields of `Sampling`. Gives `tokens`, `logps` [R, T],
    `top_ids`, `top_logps` [R, T, top], `made` [R] in this run, and `live`.
    """
    model = nnx.merge(graph, weights)
    model.target = kernels.products
    cache = state["cache"]
    count = rows["token"].shape[0]
    settings = {n: rows[n] for n in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    penalised = jnp.any(settings["repetition_penalty"] != 1)
    length = rows["length"]
    cached = jnp.arange(capacity_of(cache))
    start = {
        "t": jnp.asarray(0),
        "token": rows["token"],
        "live": rows["live"],
        "made": jnp.zeros(count, jnp.int32),
        "near": make_like(cache, count, steps),
        "seen": state["seen"],
        "tokens": jnp.zeros((count, steps), jnp.int32),
        "logps": jnp.zeros((count, steps), jnp.float32),
        "top_ids": jnp.zeros((count, steps, top), jnp.int32),
        "top_logps": jnp.zeros((count, steps, top), jnp.float32),
    }

    def running(s: dict[str, Any]) -> jax.Array:
        ended = jnp.sum(rows["live"]) - jnp.sum(s["live"])
        return (s["t"] < jnp.minimum(steps, most)) & jnp.any(s["live"]) & (ended < wake)

    def step(s: dict[str, Any]) -> dict[str, Any]:
        t = s["t"]
        at = length + t

        def attention(
            q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, mine: Any
        ) -> tuple[jax.Array, Any]:
            far, near, number = mine
            near = write(near, number, stored(k, v, kv), t)
            mine = far, near, number
            if kernels.attention:
                out = cpu_attention.attend(kernels.attention, q, far, near, number, s["live"], length, t, spec)
                return out, mine
            query = at[:, None, None]
            older = (cached < length[:, None])[:, None]
            newer = jnp.broadcast_to(jnp.arange(steps) <= t, (count, 1, steps))
            parts = [
                (layer_of(far, number), near_enough(older, query, cached, spec)),
                (layer_of(near, number), near_enough(newer, query, length[:, None, None] + jnp.arange(steps), spec)),
            ]
            return attend(q, parts, spec), mine

        hidden, near = model(
            s["token"][:, None],
            at[:, None],
            attention,
            live_BL=s["live"][:, None],
            cache=cache,
            new=s["near"],
            dtype=jnp.dtype(dtype),
        )
        each = jnp.arange(count)
        seen = jax.lax.cond(penalised, lambda x: x.at[each, s["token"]].set(True), lambda x: x, s["seen"])
        uniform = uniforms(rows["key"], rows["made"] + t)
        token, logp, (top_ids, top_logps) = sample(model.logits(hidden[:, 0]), uniform, settings, seen, top)
        made = s["made"] + s["live"]
        ended = jnp.any(token[:, None] == rows["stops"], axis=-1) | (made >= rows["left"])
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
        return {
            "t": t + 1,
            "token": token,
            "live": s["live"] & ~ended,
            "made": made,
            "near": near,
            "seen": seen,
            "tokens": put(s["tokens"], token[:, None], t),
            "logps": put(s["logps"], logp[:, None], t),
            "top_ids": put(s["top_ids"], top_ids[:, None], t),
            "top_logps": put(s["top_logps"], top_logps[:, None], t),
        }

    s = jax.lax.while_loop(running, step, start)
    found = {n: s[n] for n in ("tokens", "logps", "top_ids", "top_logps", "made", "live")}
    return {"cache": append(cache, s["near"], length), "seen": s["seen"]}, found


@functools.partial(jax.jit, donate_argnames="seen_RV")
def mark(seen_RV: jax.Array, slot: jax.Array, row_V: jax.Array) -> jax.Array:
    """`seen` with the row of one slot."""
    return jax.lax.dynamic_update_slice_in_dim(seen_RV, row_V[None], slot, 0)

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
from tuning.rollout.cache import KV, TOKEN_AXIS, Layer, append, attend, capacity_of, insert, near_enough, stored
from tuning.rollout.cpu import attention as cpu_attention
from tuning.rollout.cpu.kernels import Kernels
from tuning.rollout.sampling import sample, uniforms

State = dict[str, Any]
"""{"cache": a Layer a layer, "seen": [R, V] bool, the tokens that a repetition penalty concerns}; donated."""


@functools.partial(jax.jit, static_argnames=("graph", "prefixed", "kv", "dtype", "kernels"), donate_argnames="cache")
def prefill(
    graph: Any,
    weights: Any,
    cache: list[Layer],
    chunk: dict[str, Any],
    *,
    prefixed: bool,
    kv: KV,
    dtype: str,
    kernels: Kernels,
) -> list[Layer]:
    """The caches with those of a chunk of prompts.

    `chunk` has `tokens`, `positions` and `group` [C] (prompts 1, 2, ..., 0 is padding) and `entries` for `insert`.
    With `prefixed` the first prompt goes on behind the tokens that slot `prefix_slot` holds before position
    `positions[0]`.
    """
    model = nnx.merge(graph, weights)
    model.multiply_by(kernels.products)
    tokens, positions, group = (chunk[n][None] for n in ("tokens", "positions", "group"))
    length = tokens.shape[1]

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, far: Any) -> tuple[jax.Array, Any]:
        near = stored(k, v, kv)
        query, key = positions[:, :, None], positions[:, None]
        causal = (group[:, :, None] == group[:, None]) & (jnp.arange(length)[:, None] >= jnp.arange(length))
        parts = [(near, near_enough(causal, query, key, spec))]
        if prefixed:
            cached = jnp.arange(capacity_of(cache))[None, None]
            before = (group[:, :, None] == 1) & (cached < positions[0, 0])
            far = {n: jax.lax.dynamic_slice_in_dim(x, chunk["prefix_slot"], 1) for n, x in far.items()}
            parts.append((far, near_enough(before, query, cached, spec)))
        return attend(q, parts, spec), near

    _, new = model(tokens, positions, attention, live_BL=group > 0, cache=cache, dtype=jnp.dtype(dtype))
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
    model.multiply_by(kernels.products)
    c = model.config
    cache = state["cache"]
    count = rows["token"].shape[0]
    settings = {n: rows[n] for n in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    penalised = jnp.any(settings["repetition_penalty"] != 1)
    length = rows["length"]
    cached = jnp.arange(capacity_of(cache))
    empty = jnp.zeros((count, steps, c.num_kv_heads, c.head_dim), dtype)
    start = {
        "t": jnp.asarray(0),
        "token": rows["token"],
        "live": rows["live"],
        "made": jnp.zeros(count, jnp.int32),
        "near": [stored(empty, empty, kv) for _ in cache],
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
            q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, layer: Any
        ) -> tuple[jax.Array, Layer]:
            far, near = layer
            new = stored(k, v, kv)
            near = {n: jax.lax.dynamic_update_slice_in_dim(x, new[n], t, TOKEN_AXIS[n]) for n, x in near.items()}
            if kernels.attention:
                return cpu_attention.attend(kernels.attention, q, far, near, s["live"], length, t, spec), near
            query = at[:, None, None]
            older = (cached < length[:, None])[:, None]
            newer = jnp.broadcast_to(jnp.arange(steps) <= t, (count, 1, steps))
            parts = [
                (far, near_enough(older, query, cached, spec)),
                (near, near_enough(newer, query, length[:, None, None] + jnp.arange(steps), spec)),
            ]
            return attend(q, parts, spec), near

        hidden, near = model(
            s["token"][:, None],
            at[:, None],
            attention,
            live_BL=s["live"][:, None],
            cache=list(zip(cache, s["near"], strict=True)),
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

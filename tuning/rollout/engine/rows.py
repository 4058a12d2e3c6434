"""The loop of decoding, which slots and pages share: the rows at its start, its steps, and the tokens that it samples.

Axes as in `programs`: R rows, T steps of a run, N most probable ids, E stop ids, D hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.rollout.engine.arrays import Array
from rlhf.tuning.rollout.engine.sampling import Controls, sample, uniforms
from rlhf.tuning.rollout.requests import MAX_STOP_IDS


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
    origin_R3: Array
    """Seed and counter of the request, and number of the sample: a draw depends on them and on the token's number."""
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
    """Whether the completion continues."""


def blank_rows(count: int) -> Rows[np.ndarray]:
    """`count` rows that are not live."""
    return Rows(
        token_R=np.zeros(count, np.int32),
        length_R=np.zeros(count, np.int32),
        left_R=np.zeros(count, np.int32),
        made_R=np.zeros(count, np.int32),
        live_R=np.zeros(count, bool),
        origin_R3=np.zeros((count, 3), np.uint32),
        stops_RE=np.full((count, MAX_STOP_IDS), -1, np.int32),
        controls=Controls(
            temperature_R=np.ones(count, np.float32),
            top_p_R=np.ones(count, np.float32),
            top_k_R=np.zeros(count, np.int32),
            min_p_R=np.zeros(count, np.float32),
        ),
    )


def sampled(
    model: Any,
    hidden_RD: jax.Array,
    t: jax.Array | int,
    rows: Rows[jax.Array],
    out: Decoded[jax.Array],
    top: int,
) -> tuple[jax.Array, Decoded[jax.Array]]:
    """(next token of each row, result with them) at step `t` of a run."""
    uniform_R = uniforms(rows.origin_R3, rows.made_R + t)
    token_R, logp_R, (top_ids, top_logps) = sample(model.logits(hidden_RD), uniform_R, rows.controls, top)
    # A row that has ended still writes tokens below; its count stands still, so they are not read.
    made_R = out.made_R + out.live_R
    ended_R = jnp.any(token_R[:, None] == rows.stops_RE, axis=-1) | (made_R >= rows.left_R)
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=t, axis=1)
    return token_R, Decoded(
        tokens_RT=put(out.tokens_RT, token_R[:, None]),
        logps_RT=put(out.logps_RT, logp_R[:, None]),
        top_ids_RTN=put(out.top_ids_RTN, top_ids[:, None]),
        top_logps_RTN=put(out.top_logps_RTN, top_logps[:, None]),
        made_R=made_R,
        live_R=out.live_R & ~ended_R,
    )


def nothing_decoded(rows: Rows[jax.Array], steps: int, top: int) -> Decoded[jax.Array]:
    """The result before the first of `steps` steps."""
    count = len(rows.token_R)
    return Decoded(
        tokens_RT=jnp.zeros((count, steps), jnp.int32),
        logps_RT=jnp.zeros((count, steps), jnp.float32),
        top_ids_RTN=jnp.zeros((count, steps, top), jnp.int32),
        top_logps_RTN=jnp.zeros((count, steps, top), jnp.float32),
        made_R=jnp.zeros(count, jnp.int32),
        live_R=rows.live_R,
    )


class _Loop(NamedTuple):
    """The state of the decoding loop."""

    t: jax.Array
    """Steps done."""
    token_R: jax.Array
    cache: Any
    out: Decoded[jax.Array]


def decode_steps(
    model: Any,
    rows: Rows[jax.Array],
    cache: Any,
    feed: Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]],
    *,
    steps: int,
    top: int,
    wake: jax.Array,
    most: jax.Array | int,
) -> tuple[Any, Decoded[jax.Array]]:
    """(cache, tokens) after up to `most` tokens of every live row; there is room for `steps`.

    `feed` is called with (token of each row, step, live rows, cache) and returns (hidden states [R, D], cache). Ends
    early when no row is live, or when `wake` rows have ended in this run.
    """

    def running(loop: _Loop) -> jax.Array:
        # `wake` is an array, not static: its values compile nothing. `most` may be one too.
        ended = jnp.sum(rows.live_R) - jnp.sum(loop.out.live_R)
        return (loop.t < most) & jnp.any(loop.out.live_R) & (ended < wake)

    def step(loop: _Loop) -> _Loop:
        hidden_RD, cache = feed(loop.token_R, loop.t, loop.out.live_R, loop.cache)
        token_R, out = sampled(model, hidden_RD, loop.t, rows, loop.out, top)
        return _Loop(loop.t + 1, token_R, cache, out)

    first = _Loop(jnp.asarray(0, jnp.int32), rows.token_R, cache, nothing_decoded(rows, steps, top))
    loop = jax.lax.while_loop(running, step, first)
    return loop.cache, loop.out

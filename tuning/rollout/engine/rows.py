"""The loop of decoding, which slots and pages share: the rows at its start, its steps, and the tokens that it samples.

Axes as in `programs`: R rows, T steps of a run, N most probable ids, E stop ids, D hidden size.

Sampling draws one token a row. Randomness is counter-based (R15): a draw depends on its key alone.

Every row has its own settings, as arrays (`Controls`), so one program serves every mix of requests.
Axes: R rows, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.rollout.engine.arrays import Array
from rlhf.tuning.rollout.requests import MAX_STOP_IDS

BLOCK = 256
"""Weights of a vocabulary that `inverse_cdf` sums before it scans them."""


class Controls(NamedTuple, Generic[Array]):
    """The fields of `requests.Sampling`, one value a row."""

    temperature_R: Array
    top_p_R: Array
    top_k_R: Array
    min_p_R: Array


def uniforms(origin_R3: jax.Array, number_R: jax.Array) -> jax.Array:
    """One number in [0, 1) a row, from seed, counter and sample of `Rows.origin_R3` and the number of its token."""

    def draw(origin_3: jax.Array, number: jax.Array) -> jax.Array:
        key = jax.random.key(origin_3[0])
        for part in (origin_3[1], origin_3[2], number):
            key = jax.random.fold_in(key, part)
        return jax.random.uniform(key)

    return jax.vmap(draw)(origin_R3, number_R)


def inverse_cdf(weights_RV: jax.Array, uniform_R: jax.Array) -> jax.Array:
    """The token at which the cumulative share of non-negative weights passes `uniform_R`, [R] int32.

    The inverse of the cumulative distribution needs one uniform number a row; the Gumbel maximum needs V. The
    search has two levels: first the block of 256 tokens, by the sums of blocks, then the token inside it. So the
    cumulative sums are over V / 256 + 256 numbers, not V.

        weights   3 1 | 0 4 | 2 0     (blocks of 2 here)
        totals      4     8    10     uniform 0.7: target 7, in block 1, the first with a total above it
        inside          0 4           7 - 4 = 3: its token 1, which is token 3 of the vocabulary
    """
    rows, vocab = weights_RV.shape
    padded = jnp.pad(weights_RV, ((0, 0), (0, -vocab % BLOCK)))
    blocks = padded.reshape(rows, -1, BLOCK)
    each = blocks.sum(-1)
    totals = jnp.cumsum(each, axis=-1)
    target_R = uniform_R * totals[:, -1]

    # Counting the sums that are <= target gives the first that exceeds it. XLA adds them up in pieces: behind one of no
    # probability a sum may be larger by its rounding.
    block_R = _last_possible(each, jnp.sum(totals <= target_R[:, None], axis=-1))
    sum_before = jnp.take_along_axis(totals, jnp.maximum(block_R - 1, 0)[:, None], axis=1)[:, 0]
    before_R = jnp.where(block_R > 0, sum_before, 0.0)

    inside = jnp.take_along_axis(blocks, block_R[:, None, None], axis=1)[:, 0]
    cumulative = jnp.cumsum(inside, axis=-1)
    # Rounding can leave the target past the block's end.
    offset_R = _last_possible(inside, jnp.sum(cumulative <= (target_R - before_R)[:, None], axis=-1))
    return (block_R * BLOCK + offset_R).astype(jnp.int32)


def _last_possible(weights_RN: jax.Array, place_R: jax.Array) -> jax.Array:
    """The last place up to `place_R` whose weight is not 0, else the first after it."""
    up_to = (weights_RN > 0) & (jnp.arange(weights_RN.shape[1]) <= place_R[:, None])
    last_R = weights_RN.shape[1] - 1 - jnp.argmax(jnp.flip(up_to, axis=-1), axis=-1)
    return jnp.where(up_to.any(-1), last_R, jnp.argmax(weights_RN > 0, axis=-1))


def restrict(logits_RV: jax.Array, top_k_R: jax.Array, top_p_R: jax.Array, min_p_R: jax.Array) -> jax.Array:
    """Logits (after the temperature) with everything outside top_k, top_p and min_p at -inf.

    Each of the three keeps a prefix of the tokens in order of probability. So one sorted pass finds the shortest of the
    three prefixes, and its last logit is a threshold for the unsorted logits. Tokens that tie with it stay.
    """
    vocab = logits_RV.shape[-1]
    ordered = -jnp.sort(-logits_RV, axis=-1)
    # top_k: the first k.
    counts = jnp.where(top_k_R > 0, jnp.minimum(top_k_R, vocab), vocab)
    kept = jnp.arange(vocab) < counts[:, None]
    # top_p: tokens whose predecessors, among those that top_k keeps, hold less than p. The first always stays.
    probabilities = jax.nn.softmax(jnp.where(kept, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept &= (before < top_p_R[:, None]) | (top_p_R >= 1)[:, None]
    # min_p: p >= min_p * p_max, as logits; log(0) is -inf and keeps all.
    kept &= ordered >= ordered[:, :1] + jnp.log(min_p_R)[:, None]
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_RV >= threshold, logits_RV, -jnp.inf)


def sample(
    logits_RV: jax.Array, uniform_R: jax.Array, controls: Controls[jax.Array], top: int = 0
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """Tokens [R], their log-probabilities [R] under the distribution that was sampled (R2, R3), and the `top` most
    probable ids and log-probabilities [R, top].

    A greedy row's log-probabilities are those at temperature 1.
    """
    c = controls
    logits = logits_RV.astype(jnp.float32)
    greedy_R = c.temperature_R == 0
    temperature = jnp.where(greedy_R, 1.0, c.temperature_R)[:, None]
    restricted_R = ~greedy_R & ((c.top_k_R > 0) | (c.top_p_R < 1) | (c.min_p_R > 0))

    def limited(x: jax.Array) -> jax.Array:
        x = x / temperature
        return jnp.where(restricted_R[:, None], restrict(x, c.top_k_R, c.top_p_R, c.min_p_R), x)

    # The sort is the expensive part: it runs only in steps with a row that needs it.
    logits = jax.lax.cond(jnp.any(restricted_R), limited, lambda x: x / temperature, logits)
    most = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - most)
    norm_R = most[:, 0] + jnp.log(jnp.sum(weights, axis=-1))
    tokens_R = inverse_cdf(weights, uniform_R)

    def argmax_where_greedy(tokens_R: jax.Array) -> jax.Array:
        return jnp.where(greedy_R, jnp.argmax(logits, axis=-1).astype(jnp.int32), tokens_R)

    tokens_R = jax.lax.cond(jnp.any(greedy_R), argmax_where_greedy, lambda tokens: tokens, tokens_R)
    logps_R = jnp.take_along_axis(logits, tokens_R[:, None], axis=-1)[:, 0] - norm_R
    if not top:
        count = len(tokens_R)
        return tokens_R, logps_R, (jnp.zeros((count, 0), jnp.int32), jnp.zeros((count, 0), jnp.float32))
    values, ids = jax.lax.top_k(logits, top)
    return tokens_R, logps_R, (ids.astype(jnp.int32), values - norm_R[:, None])


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

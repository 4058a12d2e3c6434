"""Sampling of one token a row. Randomness is counter-based (R15): a draw depends on its key alone.

Every row has its own settings, as arrays (`Controls`), so one program serves every mix of requests.
Axes: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp

from rlhf.tuning.rollout.engine.arrays import Array

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

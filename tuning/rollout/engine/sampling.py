"""Sampling of one token a row. Randomness is counter-based (R15): a draw depends on its key alone.

Every row has its own settings, as arrays: what is asked for does not change the program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 256


def completion_keys(seed: int, prompt_counters: Sequence[int], samples: int) -> np.ndarray:
    """Key data [P * samples, 2] of fold_in(fold_in(key(seed), prompt), sample); neighbours do not matter."""
    data = _key_data(np.uint32(seed & 0xFFFFFFFF), np.asarray(prompt_counters, np.uint32), samples)
    return np.asarray(data).reshape(len(prompt_counters) * samples, -1)


@functools.partial(jax.jit, static_argnames="samples")
def _key_data(seed: jax.Array, prompts: jax.Array, samples: int) -> jax.Array:
    root = jax.random.key(seed)
    per_prompt = jax.vmap(lambda p: jax.random.fold_in(root, p))(prompts)
    keys = jax.vmap(lambda k: jax.vmap(lambda s: jax.random.fold_in(k, s))(jnp.arange(samples)))(per_prompt)
    return jax.random.key_data(keys)


def uniforms(key_data_R2: jax.Array, step_R: jax.Array) -> jax.Array:
    """One number in [0, 1) a row, of its key and the number of its token."""
    keys = jax.random.wrap_key_data(key_data_R2)
    return jax.vmap(lambda k, n: jax.random.uniform(jax.random.fold_in(k, n)))(keys, step_R)


def inverse_cdf(weights_RV: jax.Array, uniform_R: jax.Array) -> jax.Array:
    """The token at which the cumulative share of non-negative weights passes `uniform_R`, [R] int32.

    One uniform a row in place of V Gumbels. Blocks of 256 are summed first, so the scan is over
    V / 256 + 256 numbers.
    """
    rows, vocab = weights_RV.shape
    padded = jnp.pad(weights_RV, ((0, 0), (0, -vocab % BLOCK)))
    blocks = padded.reshape(rows, -1, BLOCK)
    totals = jnp.cumsum(blocks.sum(-1), axis=-1)
    target = uniform_R * totals[:, -1]
    # A block or token of zero probability is never the first to pass the target.
    block = jnp.minimum(jnp.sum(totals <= target[:, None], axis=-1), totals.shape[1] - 1)
    before = jnp.where(block > 0, jnp.take_along_axis(totals, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    cumulative = jnp.cumsum(inside, axis=-1)
    offset = jnp.sum(cumulative <= (target - before)[:, None], axis=-1)
    # Rounding can leave the target past the block's end: then the block's last token of any probability.
    last = BLOCK - 1 - jnp.argmax(jnp.flip(inside > 0, axis=-1), axis=-1)
    return (block * BLOCK + jnp.minimum(offset, last)).astype(jnp.int32)


def penalise(logits_RV: jax.Array, seen_RV: jax.Array, penalty_R: jax.Array) -> jax.Array:
    """Logits with those of seen tokens moved down by the repetition penalty."""
    penalty = penalty_R[:, None]
    moved = jnp.where(logits_RV > 0, logits_RV / penalty, logits_RV * penalty)
    return jnp.where(seen_RV, moved, logits_RV)


def restrict(logits_RV: jax.Array, top_k_R: jax.Array, top_p_R: jax.Array, min_p_R: jax.Array) -> jax.Array:
    """Tempered logits with everything outside top_k, top_p and min_p at -inf."""
    vocab = logits_RV.shape[-1]
    ordered = -jnp.sort(-logits_RV, axis=-1)
    counts = jnp.where(top_k_R > 0, jnp.minimum(top_k_R, vocab), vocab)
    kept = jnp.arange(vocab) < counts[:, None]
    probabilities = jax.nn.softmax(jnp.where(kept, ordered, -jnp.inf), axis=-1)
    kept &= (jnp.cumsum(probabilities, axis=-1) - probabilities < top_p_R[:, None]) | (top_p_R >= 1)[:, None]
    kept &= ordered >= ordered[:, :1] + jnp.log(min_p_R)[:, None]
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_RV >= threshold, logits_RV, -jnp.inf)


def sample(
    logits_RV: jax.Array, uniform_R: jax.Array, settings: dict[str, jax.Array], seen_RV: jax.Array, top: int = 0
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """Tokens [R], their log-probabilities [R] under the distribution that was sampled (R2, R3), and the `top` most
    probable ids and log-probabilities [R, top].

    `settings` has the fields of `Sampling`, [R] each. A greedy row's log-probabilities are those at temperature 1.
    """
    s = settings
    logits = logits_RV.astype(jnp.float32)
    greedy = s["temperature"] == 0
    temperature = jnp.where(greedy, 1.0, s["temperature"])[:, None]
    penalised = jnp.any(s["repetition_penalty"] != 1)
    restricted = ~greedy & ((s["top_k"] > 0) | (s["top_p"] < 1) | (s["min_p"] > 0))

    def limited(x: jax.Array) -> jax.Array:
        return jnp.where(restricted[:, None], restrict(x, s["top_k"], s["top_p"], s["min_p"]), x)

    def adjusted(x: jax.Array) -> jax.Array:
        moved = penalise(x, seen_RV, s["repetition_penalty"]) / temperature
        return jax.lax.cond(jnp.any(restricted), limited, lambda x: x, moved)

    # One branch for what few requests ask for: each that does nothing costs a copy of the logits.
    logits = jax.lax.cond(penalised | jnp.any(restricted), adjusted, lambda x: x / temperature, logits)
    most = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - most)
    norm = most[:, 0] + jnp.log(jnp.sum(weights, axis=-1))
    tokens = inverse_cdf(weights, uniform_R)

    def best(tokens: jax.Array) -> jax.Array:
        return jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), tokens)

    tokens = jax.lax.cond(jnp.any(greedy), best, lambda tokens: tokens, tokens)
    logps = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - norm
    if not top:
        return tokens, logps, (jnp.zeros((len(tokens), 0), jnp.int32), jnp.zeros((len(tokens), 0), jnp.float32))
    values, ids = jax.lax.top_k(logits, top)
    return tokens, logps, (ids.astype(jnp.int32), values - norm[:, None])

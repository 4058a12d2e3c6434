"""Sampling of one token a row. Randomness is counter-based (R15): a draw depends on its key alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def completion_keys(seed: int, prompt_counters: list[int], samples: int) -> jax.Array:
    """Keys [P * samples]: fold_in(fold_in(key(seed), prompt), sample); neighbours do not matter."""
    root = jax.random.key(seed)
    prompts = jnp.asarray(prompt_counters, jnp.uint32)
    per_prompt = jax.vmap(lambda p: jax.random.fold_in(root, p))(prompts)
    keys = jax.vmap(lambda k: jax.vmap(lambda s: jax.random.fold_in(k, s))(jnp.arange(samples)))(per_prompt)
    return keys.reshape(-1)


def inverse_cdf(logps_RV: jax.Array, uniform_R: jax.Array) -> jax.Array:
    """The token at which the cumulative probability passes `uniform_R`, [R] int32.

    One uniform a row in place of V Gumbels. Blocks of 256 are summed first, so the scan is over
    V / 256 + 256 numbers.
    """
    rows, vocab = logps_RV.shape
    padded = jnp.pad(jnp.exp(logps_RV), ((0, 0), (0, -vocab % BLOCK)))
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


def restrict(logits_RV: jax.Array, sampling: Sampling) -> jax.Array:
    """Tempered logits with everything outside top_k and top_p at -inf."""
    if sampling.top_k > 0:
        threshold = jax.lax.top_k(logits_RV, sampling.top_k)[0][:, -1:]
        logits_RV = jnp.where(logits_RV >= threshold, logits_RV, -jnp.inf)
    if sampling.top_p < 1.0:
        ordered = -jnp.sort(-logits_RV, axis=-1)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        kept = jnp.cumsum(probabilities, axis=-1) - probabilities < sampling.top_p
        threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits_RV = jnp.where(logits_RV >= threshold, logits_RV, -jnp.inf)
    return logits_RV


def sample(logits_RV: jax.Array, keys_R: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Tokens [R] and their log-probabilities [R] under the distribution that was sampled (R2, R3)."""
    logits = logits_RV.astype(jnp.float32)
    if sampling.temperature == 0:
        logps = jax.nn.log_softmax(logits, axis=-1)
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        logps = jax.nn.log_softmax(restrict(logits / sampling.temperature, sampling), axis=-1)
        tokens = inverse_cdf(logps, jax.vmap(jax.random.uniform)(keys_R))
    return tokens, jnp.take_along_axis(logps, tokens[:, None], axis=-1)[:, 0]

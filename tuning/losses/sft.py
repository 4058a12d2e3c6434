"""Supervised fine-tuning losses per target token.

Axes: B rows, T target tokens: `logps[b, t]` is the log-probability of the token at the position that the mask marks.
Aggregate with "token-mean" and the target count of the whole optimizer step.
"""

import jax
import jax.numpy as jnp


def nll(logps_BT: jax.Array) -> jax.Array:
    """Negative log-likelihood, [B, T]."""
    return -logps_BT


def dft(logps_BT: jax.Array) -> jax.Array:
    """Dynamic fine-tuning (arXiv:2508.05629), [B, T]: -stop_gradient(p) log p."""
    return -jax.lax.stop_gradient(jnp.exp(logps_BT)) * logps_BT


def smoothed_nll(logps_BT: jax.Array, mean_logps_BT: jax.Array, eps: float) -> jax.Array:
    """Label smoothing over the vocabulary, [B, T]: (1 - eps) nll - eps * mean_v log p_v."""
    return -(1 - eps) * logps_BT - eps * mean_logps_BT


def target_mask(mask_BT: jax.Array, segment_ids_BT: jax.Array | None = None) -> jax.Array:
    """Mask of the targets of positions 0..T-2, [B, T-1]: position t predicts token t + 1 where that token counts.

    In packed rows the first token of a segment is no target, and segment 0 is padding.
    """
    target = mask_BT[:, 1:] > 0
    if segment_ids_BT is not None:
        target &= (segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1]) & (segment_ids_BT[:, 1:] > 0)
    return target.astype(jnp.int32)

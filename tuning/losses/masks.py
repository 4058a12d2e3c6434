"""Masks of completion tokens, and sums under a mask.

Axes: B completions (rows), T completion tokens. A mask is 1 (or True) on tokens that count. Masked positions may hold
anything, NaN and infinity included: every loss replaces them with `masked` before it does arithmetic, since
`0 * inf` is NaN in the value and in the gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np


def sampled_mask(lengths_B: np.ndarray, rollout_logps_BT: np.ndarray) -> np.ndarray:
    """True on the first `lengths_B[b]` tokens whose sampler log-probability is finite, [B, T] bool, on the host.

    Lengths count the end-of-sequence token. They are recorded, never found by searching for a pad id, because pad and
    end of sequence are the same token in many models. A token of infinite log-probability has no importance weight; it
    counts neither in the loss nor in its denominator.
    """
    before_end_BT = np.arange(rollout_logps_BT.shape[1]) < lengths_B[:, None]
    return before_end_BT & np.isfinite(rollout_logps_BT)


def masked(x: jax.Array, mask: jax.Array, fill: float = 0.0) -> jax.Array:
    """`x` where the mask is set, `fill` elsewhere; shapes broadcast; no gradient reaches masked positions."""
    # `where` selects; a product would keep NaN * 0 = NaN.
    return jnp.where(mask > 0, x, jnp.asarray(fill, x.dtype))


def row_sum(x_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Sum over each row's valid tokens, [B, 1]."""
    return masked(x_BT, mask_BT).sum(-1, keepdims=True)


def row_mean(x_BT: jax.Array, mask_BT: jax.Array, eps: float = 0.0) -> jax.Array:
    """Mean over each row's valid tokens, [B, 1]; 0 for a row without any. `eps` is added to the length."""
    length = jnp.maximum((mask_BT > 0).sum(-1, keepdims=True), 1)
    return row_sum(x_BT, mask_BT) / (length.astype(x_BT.dtype) + eps)


def per_token(x: jax.Array, like_BT: jax.Array) -> jax.Array:
    """Broadcast [B] or [B, 1] values over the tokens of their rows; [B, T] values stay."""
    x = x[:, None] if x.ndim == 1 else x
    return jnp.broadcast_to(x, like_BT.shape)

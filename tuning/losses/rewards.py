"""Rewards from which advantages are computed: the score of a completion, less the KL to the reference.

Axes: B completions, T completion tokens. With coefficient beta the reward of token t is

    r_t = [t is the last token] * score - beta * KL_t

(Ziegler et al., arXiv:1909.08593), and that of a completion taken as one action score - beta * sum_t KL_t (RLOO,
arXiv:2402.14740). KL_t comes from the policy before the update, so it carries no gradient.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.losses.kl import Clamp, KLKind, kl_per_token
from rlhf.tuning.losses.masks import masked

Array = TypeVar("Array", jax.Array, np.ndarray)


def terminal_rewards(scores_B: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Each row's score on its last valid token (the EOS token of a finished completion), 0 elsewhere, [B, T]."""
    valid = (mask_BT > 0).astype(jnp.int32)
    # The running count reaches the total at the last valid token, and stays there on the masked ones after it.
    is_last = (valid == 1) & (jnp.cumsum(valid, -1) == valid.sum(-1, keepdims=True))
    return jnp.where(is_last, scores_B[:, None], jnp.zeros((), scores_B.dtype))


def kl_penalty(
    old_logps_BT: jax.Array,
    ref_logps_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    coef: float,
    kind: KLKind = "k1",
    log_ratio_clamp: Clamp | None = (-20.0, 20.0),
    value_clamp: Clamp | None = None,
) -> jax.Array:
    """coef * KL_t of every valid token, [B, T], 0 where masked. Options as in `kl_per_token`."""
    kl = kl_per_token(
        old_logps_BT, ref_logps_BT, kind, mask_BT=mask_BT, log_ratio_clamp=log_ratio_clamp, value_clamp=value_clamp
    )
    return masked(coef * kl, mask_BT)


def token_rewards(scores_B: jax.Array, penalty_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Rewards of every token, [B, T]: the score on the last valid one, less `kl_penalty`."""
    return terminal_rewards(scores_B, mask_BT) - penalty_BT


def sequence_rewards(scores_B: Array, penalty_BT: Array) -> Array:
    """Rewards of completions taken as one action, [B]: the score less the `kl_penalty` of all tokens."""
    return scores_B - penalty_BT.sum(-1)

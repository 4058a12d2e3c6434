"""Shaping of rewards: the KL penalty inside the reward, terminal placement, length penalties."""

import jax
import jax.numpy as jnp

from tuning.losses.kl import Clamp, KLKind, kl_per_token
from tuning.losses.masks import masked, row_sum


def terminal_rewards(scores_B: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Each row's score on its last valid token (the EOS token of a finished completion), 0 elsewhere, [B, T]."""
    valid = (mask_BT > 0).astype(jnp.int32)
    is_last = (valid == 1) & (jnp.cumsum(valid, -1) == valid.sum(-1, keepdims=True))
    return jnp.where(is_last, scores_B[:, None], jnp.zeros((), scores_B.dtype))


def kl_in_reward(
    scores_B: jax.Array,
    old_logps_BT: jax.Array,
    ref_logps_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    coef: float,
    kind: KLKind = "k1",
    log_ratio_clamp: Clamp | None = None,
    value_clamp: Clamp | None = None,
    score_clip: Clamp | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Token rewards of PPO-RLHF: -coef * KL_t on every valid token plus the score on the last one, [B, T].

    Also returns the per-token KL, [B, T], for the metrics and the adaptive coefficient.
    """
    kl = kl_per_token(
        old_logps_BT, ref_logps_BT, kind, mask_BT=mask_BT, log_ratio_clamp=log_ratio_clamp, value_clamp=value_clamp
    )
    kl = jax.lax.stop_gradient(masked(kl, mask_BT))
    scores = scores_B if score_clip is None else jnp.clip(scores_B, *score_clip)
    return terminal_rewards(scores, mask_BT) - coef * kl, kl


def sequence_kl_penalty(
    rewards_B: jax.Array, old_logps_BT: jax.Array, ref_logps_BT: jax.Array, mask_BT: jax.Array, *, coef: float
) -> jax.Array:
    """Sequence rewards less coef times the sum of k1 over the sequence, [B] (RLOO, arXiv:2402.14740)."""
    kl = kl_per_token(old_logps_BT, ref_logps_BT, "k1", mask_BT=mask_BT, log_ratio_clamp=None)
    return rewards_B - coef * row_sum(kl, mask_BT)[:, 0]


def overlong_penalty(
    lengths_B: jax.Array, *, max_length: int, buffer: int, factor: float = 1.0, capped: bool = True
) -> jax.Array:
    """Soft overlong punishment (DAPO, arXiv:2503.14476), [B], to be added to the rewards.

    0 up to max_length - buffer, then falling linearly to -factor at max_length; past it the penalty stays at -factor
    if `capped`, else grows on.
    """
    excess = jnp.maximum(lengths_B - (max_length - buffer), 0) / buffer
    return -factor * (jnp.minimum(excess, 1.0) if capped else excess)


def truncation_penalty(rewards_B: jax.Array, truncated_B: jax.Array, *, coef: float) -> jax.Array:
    """Rewards of truncated samples become reward * coef for coef >= 0, and coef itself if negative, [B]."""
    penalised = rewards_B * coef if coef >= 0 else jnp.full_like(rewards_B, coef)
    return jnp.where(truncated_B > 0, penalised, rewards_B)

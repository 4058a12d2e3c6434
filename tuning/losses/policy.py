"""Policy losses of RL fine-tuning: ratios, clipped surrogates, CISPO, REINFORCE.

Axes: B completions, T completion tokens. Each loss returns per-token losses [B, T], 0 where masked, and a dict of
metric *sums* (divide by `n_tokens` after summing over the step). `rlhf.tuning.losses.aggregate.aggregate` makes a
scalar of them. Advantages are [B] or [B, T]; `mask_BT` is 1 on tokens that count. Importance weights for the
gap between sampler and trainer (`rlhf.tuning.losses.importance`) multiply the returned losses; KL and entropy terms
are aggregated apart.

`old_logps` is the policy at the start of the update; with one update per batch pass `stop_gradient(logps)`.
Losses with another trust region than the clip are in `rlhf.tuning.losses.policy_variants`.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from rlhf.tuning.losses.kl import Clamp, clamp
from rlhf.tuning.losses.masks import masked, per_token, row_mean, row_sum

Ratio = Literal["token", "sequence", "sequence-token", "sequence-sum"]
Metrics = dict[str, jax.Array]
LOG_RATIO_CLAMP: Clamp = (-20.0, 20.0)
"""Limits of a log ratio, so that its exponential is finite."""


def log_ratio(
    logps_BT: jax.Array,
    old_logps_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    level: Ratio = "token",
    log_ratio_clamp: Clamp | None = LOG_RATIO_CLAMP,
) -> jax.Array:
    """log(pi / pi_old) on every token, [B, T], 0 where masked, limited to `log_ratio_clamp`.

    With z = logps - old_logps and means and sums over the valid tokens of the token's sequence:

    - "token": z
    - "sequence": mean(z), the gradient flows through the mean (GSPO, arXiv:2507.18071)
    - "sequence-token": the value of mean(z), the gradient of the token's own z (GSPO-token)
    - "sequence-sum": sum(z), the exact ratio of the sequence (RLOO, arXiv:2402.14740)
    """
    z = masked(logps_BT, mask_BT) - masked(old_logps_BT, mask_BT)
    match level:
        case "token":
            out = z
        case "sequence":
            out = row_mean(z, mask_BT)
        case "sequence-token":
            # The value is mean(z), the gradient that of z alone.
            out = jax.lax.stop_gradient(row_mean(z, mask_BT) - z) + z
        case "sequence-sum":
            out = row_sum(z, mask_BT)
        case _:
            raise ValueError(f"unknown ratio {level!r}")
    # Outside the clamp the ratio has no gradient.
    return masked(clamp(jnp.broadcast_to(out, z.shape), log_ratio_clamp), mask_BT)


def metric_sums(z: jax.Array, mask: jax.Array, **extra: jax.Array) -> Metrics:
    """Sums over valid tokens: the ratio, the KL estimate E[-log r] of the update, the token count, and `extra`."""
    ratio = masked(jnp.exp(z), mask)
    sums = {"ratio": ratio, "ratio_sq": ratio**2, "approx_kl": -z, "n_tokens": (mask > 0).astype(z.dtype), **extra}
    return {name: jax.lax.stop_gradient(masked(x.astype(z.dtype), mask).sum()) for name, x in sums.items()}


def clipped_surrogate(
    logps_BT: jax.Array,
    old_logps_BT: jax.Array,
    advantages: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    ratio: Ratio = "token",
    log_ratio_clamp: Clamp | None = LOG_RATIO_CLAMP,
) -> tuple[jax.Array, Metrics]:
    """PPO's clipped objective (arXiv:1707.06347), [B, T]: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)).

    `clip_high > clip_low` is clip-higher (DAPO). `dual_clip` c > 1 limits the loss of tokens with A < 0 to -A c
    (arXiv:1912.09729). `ratio` as in `log_ratio`.
    Metrics: `clip_high` (A > 0, r above the range), `clip_low` (A < 0, r below), `dual_clip`, `ratio`, `ratio_sq`,
    `approx_kl`, `n_tokens`.
    """
    # A bound of 1 or less would hold even where the policy has not moved.
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    z = log_ratio(logps_BT, old_logps_BT, mask_BT, level=ratio, log_ratio_clamp=log_ratio_clamp)
    adv = masked(per_token(advantages, z), mask_BT)
    r = jnp.exp(z)
    plain, clipped = -adv * r, -adv * jnp.clip(r, 1 - clip_low, 1 + clip_high)
    # The pessimistic branch: clipping removes the gradient only where the move already goes with the advantage.
    loss = jnp.maximum(plain, clipped)
    capped = jnp.zeros_like(z)
    if dual_clip is not None:
        cap = -adv * dual_clip
        capped = (adv < 0) & (loss > cap)
        loss = jnp.where(adv < 0, jnp.minimum(loss, cap), loss)
    is_clipped = clipped > plain
    sums = metric_sums(z, mask_BT, clip_high=is_clipped & (adv > 0), clip_low=is_clipped & (adv < 0), dual_clip=capped)
    return loss, sums


def policy_gradient(
    logps_BT: jax.Array,
    old_logps_BT: jax.Array,
    advantages: jax.Array,
    mask_BT: jax.Array,
    *,
    ratio: Ratio = "token",
    log_ratio_clamp: Clamp | None = LOG_RATIO_CLAMP,
) -> tuple[jax.Array, Metrics]:
    """Importance-weighted policy gradient without clipping, [B, T]: -A r."""
    z = log_ratio(logps_BT, old_logps_BT, mask_BT, level=ratio, log_ratio_clamp=log_ratio_clamp)
    adv = masked(per_token(advantages, z), mask_BT)
    return -adv * jnp.exp(z), metric_sums(z, mask_BT)


def reinforce(logps_BT: jax.Array, advantages: jax.Array, mask_BT: jax.Array) -> tuple[jax.Array, Metrics]:
    """REINFORCE (Williams, 1992), [B, T]: -A log pi."""
    logps = masked(logps_BT, mask_BT)
    adv = masked(per_token(advantages, logps), mask_BT)
    return -adv * logps, {"n_tokens": (mask_BT > 0).sum().astype(logps.dtype)}


def cispo(
    logps_BT: jax.Array,
    old_logps_BT: jax.Array,
    advantages: jax.Array,
    mask_BT: jax.Array,
    *,
    weight_max: float,
    weight_min: float | None = None,
    log_ratio_clamp: Clamp | None = LOG_RATIO_CLAMP,
) -> tuple[jax.Array, Metrics]:
    """CISPO (arXiv:2506.13585), [B, T]: -stop_gradient(clip(r, weight_min, weight_max)) A log pi.

    The bounds are those of the weight itself, not distances from 1. Metrics as in `clipped_surrogate`: here
    `clip_high` and `clip_low` count weights that reached a bound.
    """
    z = log_ratio(logps_BT, old_logps_BT, mask_BT, log_ratio_clamp=log_ratio_clamp)
    adv, logps = masked(per_token(advantages, z), mask_BT), masked(logps_BT, mask_BT)
    r = jax.lax.stop_gradient(jnp.exp(z))
    # The gradient flows through log pi alone, so a clipped token keeps one (PPO's clip would drop it).
    weight = clamp(r, (weight_min, weight_max))
    return -weight * adv * logps, metric_sums(z, mask_BT, clip_high=r > weight, clip_low=r < weight)

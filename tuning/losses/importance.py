"""Stop-gradient weights for samples whose sampler is not the trainer's old policy.

rho = pi_old / mu with mu the policy that sampled; l = old_logps - rollout_logps on valid tokens. Weights and masks
multiply the per-token policy loss before aggregation (never the KL or the entropy term). They carry no gradient
and are 0 where masked. Tokens whose sampler log-probability is not finite belong out of the mask
(`rlhf.tuning.losses.masks.sampled_mask`).
"""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from rlhf.tuning.losses.kl import Clamp, clamp
from rlhf.tuning.losses.masks import masked, row_mean, row_sum

Level = Literal["token", "sequence", "sequence-mean"]


def _log_rho(old_logps_BT: jax.Array, rollout_logps_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """log(pi_old / mu), [B, T], 0 where masked, without gradient."""
    return jax.lax.stop_gradient(masked(old_logps_BT, mask_BT) - masked(rollout_logps_BT, mask_BT))


def importance_weights(
    old_logps_BT: jax.Array,
    rollout_logps_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    level: Level = "token",
    weight_min: float | None = None,
    weight_max: float | None = None,
    outside: Literal["clip", "zero"] = "clip",
    batch_normalise: bool = False,
    log_ratio_clamp: Clamp | None = (-20.0, 20.0),
) -> jax.Array:
    """Weights rho of sampled tokens, [B, T].

    level: "token" exp(l); "sequence" exp(sum_t l); "sequence-mean" exp(mean_t l). Weights outside
    [weight_min, weight_max] are limited to it ("clip": truncated importance sampling) or dropped ("zero": masked
    importance sampling, IcePop). batch_normalise divides by the mean weight: over valid tokens at level "token", else
    over sequences with a valid token. Raises ValueError for an unknown level.
    """
    log_rho = _log_rho(old_logps_BT, rollout_logps_BT, mask_BT)
    match level:
        case "token":
            stat = log_rho
        case "sequence":
            stat = row_sum(log_rho, mask_BT)
        case "sequence-mean":
            stat = row_mean(log_rho, mask_BT)
        case _:
            raise ValueError(f"unknown level {level!r}")
    # The clamp comes before exp, so that a far outlier is a large finite weight rather than infinity.
    weights = jnp.exp(clamp(jnp.broadcast_to(stat, log_rho.shape), log_ratio_clamp))
    if outside == "clip":
        weights = clamp(weights, (weight_min, weight_max))
    else:
        weights = masked(weights, _inside(weights, (weight_min, weight_max)))
    weights = masked(weights, mask_BT)
    if batch_normalise:
        # A sequence's tokens share one weight, so its maximum is that weight; masked tokens are 0.
        if level == "token":
            mean = weights.sum() / jnp.maximum((mask_BT > 0).sum(), 1)
        else:
            rows = (mask_BT > 0).any(-1)
            mean = weights.max(-1).sum() / jnp.maximum(rows.sum(), 1)
        weights = weights / jnp.where(mean > 0, mean, 1)
    return weights


def _inside(x: jax.Array, bounds: Clamp) -> jax.Array:
    """Where x lies within the bounds, ends included; None leaves a side open."""
    return clamp(x, bounds) == x


def gated_weights(
    old_logps_BT: jax.Array,
    rollout_logps_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    band: Clamp,
    log_ratio_clamp: Clamp | None = (-20.0, 20.0),
) -> jax.Array:
    """Token weights rho of rows whose geometric mean ratio exp(mean_t l) lies within `band`, else 0, [B, T].

    Weights inside an accepted row are not limited.
    """
    log_rho = _log_rho(old_logps_BT, rollout_logps_BT, mask_BT)
    # Clamped before exp: a far outlier is a large finite weight (R5).
    mean_ratio = jnp.exp(clamp(row_mean(log_rho, mask_BT), log_ratio_clamp))
    rho = jnp.exp(clamp(log_rho, log_ratio_clamp))
    return masked(masked(rho, _inside(jnp.broadcast_to(mean_ratio, rho.shape), band)), mask_BT)


def mismatch_metrics(old_logps_BT: jax.Array, rollout_logps_BT: jax.Array, mask_BT: jax.Array) -> dict[str, jax.Array]:
    """Sums over valid tokens that describe the gap between sampler and trainer; divide by `n_tokens` last.

    `mismatch_kl` sums k1 = -l and `mismatch_k3` sums e^l - 1 - l, estimates of KL(mu || pi_old); `mismatch_abs` sums
    |l|; `weight` and `weight_sq` sum rho, limited to [e^-20, e^20], and its square (see `effective_sample_size`).
    """
    log_rho = _log_rho(old_logps_BT, rollout_logps_BT, mask_BT)
    rho = masked(jnp.exp(jnp.clip(log_rho, -20, 20)), mask_BT)
    sums = {
        "mismatch_kl": -log_rho,
        # Masked tokens have log rho 0 but rho 0 instead of 1: without the mask each would add -1.
        "mismatch_k3": masked(rho - 1 - log_rho, mask_BT),
        "mismatch_abs": jnp.abs(log_rho),
    }
    sums |= {"weight": rho, "weight_sq": rho**2, "n_tokens": (mask_BT > 0).astype(log_rho.dtype)}
    return {name: x.sum() for name, x in sums.items()}


_ABOVE = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0)
RATIO_EDGES = (*(-edge for edge in reversed(_ABOVE)), *_ABOVE)
"""Borders of the bins in which log rho is counted: counts add up over micro-batches, quantiles do not."""


def log_ratio_bins(old_logps_BT: jax.Array, rollout_logps_BT: jax.Array, mask_BT: jax.Array) -> dict[str, jax.Array]:
    """Valid tokens by log(pi_old / mu): `ratio_bin_00` below the first of RATIO_EDGES, and so on to the last."""
    log_rho = _log_rho(old_logps_BT, rollout_logps_BT, mask_BT)
    bins = jnp.searchsorted(jnp.asarray(RATIO_EDGES, log_rho.dtype), log_rho)
    counts = jnp.zeros(len(RATIO_EDGES) + 1, jnp.float32).at[bins].add((mask_BT > 0).astype(jnp.float32))
    return {f"ratio_bin_{i:02d}": counts[i] for i in range(len(RATIO_EDGES) + 1)}


def ratio_quantile(bins: Sequence[float], share: float) -> float:
    """The ratio pi_old / mu below which `share` of the tokens lie, from the counts of `log_ratio_bins`.

    Linear in log rho within a bin; the open bins at both ends count as their border, the middle one, within 0.1 % of 1,
    as 1.
    """
    edges = (RATIO_EDGES[0], *RATIO_EDGES, RATIO_EDGES[-1])
    # Walks the cumulative counts to the bin that reaches the target; an empty bin has no tokens to interpolate.
    target, below = share * sum(bins), 0.0
    for i, count in enumerate(bins):
        if below + count >= target and count > 0:
            low, high = edges[i], edges[i + 1]
            if low < 0 < high:
                return 1.0
            return math.exp(low + (high - low) * (target - below) / count)
        below += count
    return 1.0


def effective_sample_size(weight_sum: float, weight_sq_sum: float) -> float:
    """Kish's effective sample size (sum w)^2 / sum w^2, in tokens, from sums over the step; 0 without any weight."""
    return weight_sum**2 / max(weight_sq_sum, 1e-12)

"""Rarer policy losses, with the conventions of `tuning.losses.policy`: losses [B, T] and metric sums.

Axes: B completions, T completion tokens. Advantages are [B] or [B, T]; z = logps - old_logps, r = exp(z).
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from tuning.losses.kl import Clamp
from tuning.losses.masks import masked, per_token, row_mean, row_sum
from tuning.losses.policy import LOG_RATIO_CLAMP, Metrics, clipped_surrogate, log_ratio, metric_sums


def sapo(
    logps_BT: jax.Array,
    old_logps_BT: jax.Array,
    advantages: jax.Array,
    mask_BT: jax.Array,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    log_ratio_clamp: Clamp | None = LOG_RATIO_CLAMP,
) -> tuple[jax.Array, Metrics]:
    """SAPO (arXiv:2511.20347), a smooth gate for the clip: -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A."""
    z = log_ratio(logps_BT, old_logps_BT, mask_BT, log_ratio_clamp=log_ratio_clamp)
    adv = masked(per_token(advantages, z), mask_BT)
    tau = jnp.where(adv > 0, tau_pos, tau_neg)
    return -adv * (4 / tau) * jax.nn.sigmoid(tau * (jnp.exp(z) - 1)), metric_sums(z, mask_BT)


def vespo_weights(
    log_ratios_BT: jax.Array,
    advantages_B: jax.Array,
    mask_BT: jax.Array,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
    log_importance_BT: jax.Array | None = None,
) -> jax.Array:
    """VESPO's sequence weight phi, [B, 1], no gradient: log phi = lambda + k log w - lambda w.

    log w sums the token log-ratios (each within +-20), and with `log_importance_BT` (log pi_old / mu) those too, within
    [log 1e-8, 20]. The parameters go by the sign of A. phi(1) = 1.
    """
    low = math.log(1e-8)
    log_w = row_sum(jnp.clip(masked(log_ratios_BT, mask_BT), -20, 20), mask_BT)
    if log_importance_BT is not None:
        log_w = log_w + row_sum(jnp.clip(masked(log_importance_BT, mask_BT), low, 20), mask_BT)
    log_w = jnp.clip(log_w, low, 20)
    positive = advantages_B[:, None] >= 0
    k, lam = jnp.where(positive, k_pos, k_neg), jnp.where(positive, lambda_pos, lambda_neg)
    return stop_gradient(jnp.exp(lam + k * log_w - lam * jnp.exp(log_w)))


def vespo(
    logps_BT: jax.Array,
    old_logps_BT: jax.Array,
    advantages_B: jax.Array,
    mask_BT: jax.Array,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
    log_importance_BT: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """VESPO (arXiv:2602.10693): -phi A log pi with phi of `vespo_weights`."""
    z = log_ratio(logps_BT, old_logps_BT, mask_BT)
    phi = vespo_weights(
        z, advantages_B, mask_BT, k_pos=k_pos, lambda_pos=lambda_pos, k_neg=k_neg, lambda_neg=lambda_neg,
        log_importance_BT=log_importance_BT,
    )  # fmt: skip
    adv = masked(per_token(advantages_B, z), mask_BT)
    return -phi * adv * masked(logps_BT, mask_BT), metric_sums(z, mask_BT)


def dppo(
    logps_BT: jax.Array,
    old_logps_BT: jax.Array,
    advantages: jax.Array,
    mask_BT: jax.Array,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    limit_low: float,
    limit_high: float,
    ratio_max: float = 10.0,
    log_ratio_clamp: Clamp | None = LOG_RATIO_CLAMP,
) -> tuple[jax.Array, Metrics]:
    """DPPO (arXiv:2602.04879): -A stop_gradient(min(r, ratio_max) * valid) log pi.

    The trust region is on the token's probability, p new and q old. A token with A > 0 is valid if p - q <= limit_high
    ("tv"), or if the binary KL(q, p) <= limit_high or p <= q ("kl"); with A <= 0 if p - q >= -limit_low, or
    KL <= limit_low or p >= q. `clip_high` and `clip_low` count the tokens left out.
    """
    z = log_ratio(logps_BT, old_logps_BT, mask_BT, log_ratio_clamp=log_ratio_clamp)
    adv = masked(per_token(advantages, z), mask_BT)
    logps, old = masked(logps_BT, mask_BT), masked(old_logps_BT, mask_BT)
    p, q = jnp.exp(logps), jnp.exp(old)
    if divergence == "tv":
        valid_pos, valid_neg = p - q <= limit_high, p - q >= -limit_low
    else:
        kl = q * (old - logps) + (1 - q) * jnp.log((1 - q + 1e-8) / (1 - p + 1e-8))
        valid_pos, valid_neg = (kl <= limit_high) | (p <= q), (kl <= limit_low) | (p >= q)
    valid = jnp.where(adv > 0, valid_pos, valid_neg)
    weight = stop_gradient(jnp.minimum(jnp.exp(z), ratio_max) * valid)
    sums = metric_sums(z, mask_BT, clip_high=~valid & (adv > 0), clip_low=~valid & (adv <= 0))
    return -adv * weight * logps, sums


def gmpo(
    logps_BT: jax.Array,
    old_logps_BT: jax.Array,
    advantages: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    row_eps: float = 0.0,
) -> tuple[jax.Array, Metrics]:
    """GMPO (arXiv:2507.20673): -mean(A) exp(mean(u)) over the row's valid tokens, one value a row broadcast to [B, T].

    u = sign(A) min(sign(A) z, sign(A) clip(z, -clip_low, clip_high)). Aggregate with "sequence-mean-token-mean".
    row_eps is added to the row's length.
    """
    z = log_ratio(logps_BT, old_logps_BT, mask_BT, log_ratio_clamp=None)
    adv = masked(per_token(advantages, z), mask_BT)
    sign = jnp.sign(adv)
    clipped = jnp.clip(z, -clip_low, clip_high)
    u = sign * jnp.minimum(sign * z, sign * clipped)
    loss = -row_mean(adv, mask_BT, row_eps) * jnp.exp(row_mean(u, mask_BT, row_eps))
    sums = metric_sums(z, mask_BT, clip_high=(adv > 0) & (z > clip_high), clip_low=(adv < 0) & (z < -clip_low))
    return masked(jnp.broadcast_to(loss, z.shape), mask_BT), sums


def _covariance(logps_BT: jax.Array, adv_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """(A - mean A)(log pi - mean log pi) with means over the valid tokens given, [B, T], no gradient."""
    logps = stop_gradient(masked(logps_BT, mask_BT))
    n = jnp.maximum((mask_BT > 0).sum(), 1)
    return (adv_BT - adv_BT.sum() / n) * (logps - logps.sum() / n)


def _largest(score_BT: jax.Array, candidates_BT: jax.Array, k: jax.Array) -> jax.Array:
    """The k candidates of highest score, as a boolean mask."""
    score = jnp.where(candidates_BT, score_BT, -jnp.inf).reshape(-1)
    rank = jnp.argsort(jnp.argsort(-score)).reshape(score_BT.shape)
    return (rank < k) & candidates_BT


def _share(mask_BT: jax.Array, ratio: float) -> jax.Array:
    """max(1, int(ratio * valid tokens))."""
    return jnp.maximum(jnp.floor(ratio * (mask_BT > 0).sum()), 1)


def clip_cov(
    logps_BT: jax.Array,
    old_logps_BT: jax.Array,
    advantages: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    ratio: float = 0.0002,
    key: jax.Array | None = None,
    log_ratio_clamp: Clamp | None = LOG_RATIO_CLAMP,
) -> tuple[jax.Array, Metrics]:
    """Clip-Cov (arXiv:2505.22617): the clipped surrogate, detached on some tokens of high covariance of A and log pi.

    Candidates are valid unclipped tokens whose covariance lies between cov_low and cov_high; of them
    max(1, int(ratio N)) are set to 0, drawn with `key`, or the largest covariances without one. Covariances are taken
    over the batch given here, so give the whole mini-batch.
    """
    loss, sums = clipped_surrogate(
        logps_BT, old_logps_BT, advantages, mask_BT, clip_low=clip_low, clip_high=clip_high,
        log_ratio_clamp=log_ratio_clamp,
    )  # fmt: skip
    z = log_ratio(logps_BT, old_logps_BT, mask_BT, log_ratio_clamp=log_ratio_clamp)
    adv = masked(per_token(advantages, z), mask_BT)
    r = jnp.exp(z)
    clipped = -adv * jnp.clip(r, 1 - clip_low, 1 + clip_high) > -adv * r
    cov = _covariance(logps_BT, adv, mask_BT)
    candidates = (mask_BT > 0) & ~clipped & (cov > cov_low) & (cov < cov_high)
    score = cov if key is None else jax.random.uniform(key, cov.shape, cov.dtype)
    dropped = _largest(score, candidates, _share(mask_BT, ratio))
    return jnp.where(dropped, 0, loss), sums | {"covariance_dropped": dropped.sum().astype(loss.dtype)}


def kl_cov(
    logps_BT: jax.Array,
    old_logps_BT: jax.Array,
    advantages: jax.Array,
    mask_BT: jax.Array,
    *,
    ratio: float = 0.0002,
    coef: float = 1.0,
    log_ratio_clamp: Clamp | None = LOG_RATIO_CLAMP,
) -> tuple[jax.Array, Metrics]:
    """KL-Cov (arXiv:2505.22617): -A r, plus coef |z| on the max(1, int(ratio N)) tokens of largest covariance.

    Covariances as in `clip_cov`.
    """
    z = log_ratio(logps_BT, old_logps_BT, mask_BT, log_ratio_clamp=log_ratio_clamp)
    adv = masked(per_token(advantages, z), mask_BT)
    chosen = _largest(_covariance(logps_BT, adv, mask_BT), mask_BT > 0, _share(mask_BT, ratio))
    return -adv * jnp.exp(z) + jnp.where(chosen, coef * jnp.abs(z), 0), metric_sums(z, mask_BT)


def dro(
    logps_BT: jax.Array, old_logps_BT: jax.Array, advantages: jax.Array, mask_BT: jax.Array, *, beta: float = 0.1
) -> tuple[jax.Array, Metrics]:
    """DRO (arXiv:2405.19107): -A log pi + 0.5 beta z^2."""
    z = log_ratio(logps_BT, old_logps_BT, mask_BT, log_ratio_clamp=None)
    adv = masked(per_token(advantages, z), mask_BT)
    return -adv * masked(logps_BT, mask_BT) + 0.5 * beta * z**2, metric_sums(z, mask_BT)


def top_entropy_mask(entropy_BT: jax.Array, mask_BT: jax.Array, share: float) -> jax.Array:
    """Keep the `share` of valid tokens of highest entropy (arXiv:2506.01939), [B, T], 1 = keep.

    That is entropy >= its (1 - share) quantile over the valid tokens given. Multiplies the per-token loss; the
    denominators still count every valid token.
    """
    entropy = stop_gradient(masked(entropy_BT, mask_BT))
    threshold = jnp.nanquantile(masked(entropy, mask_BT, jnp.nan), 1 - share)
    return ((mask_BT > 0) & (entropy >= threshold)).astype(entropy.dtype)

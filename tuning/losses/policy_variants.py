"""Policy losses with another trust region than the clip, with the conventions of `rlhf.tuning.losses.policy`.

Axes: C completions, T completion tokens. z = logps - old_logps, r = exp(z). Each loss returns losses [C, T], 0 where
masked, and metric sums.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from rlhf.tuning.losses.masks import masked, row_mean, row_sum
from rlhf.tuning.losses.policy import LOG_RATIO_CLAMP, Metrics, Terms, metric_sums


def sapo(t: Terms, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> tuple[jax.Array, Metrics]:
    """SAPO (arXiv:2511.20347), a smooth gate for the clip: -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A."""
    z, adv = t.ratios()
    tau = jnp.where(adv > 0, tau_pos, tau_neg)
    return -adv * (4 / tau) * jax.nn.sigmoid(tau * (jnp.exp(z) - 1)), metric_sums(z, t.mask_CT)


def dppo(
    t: Terms,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    limit_low: float,
    limit_high: float,
    ratio_max: float = 10.0,
) -> tuple[jax.Array, Metrics]:
    """DPPO (arXiv:2602.04879): -A stop_gradient(min(r, ratio_max) * valid) log pi.

    The trust region is on the token's probability, p new and q old. A token with A > 0 is valid if p - q <= limit_high
    ("tv"), or if the binary KL(q, p) <= limit_high or p <= q ("kl"); with A <= 0 if p - q >= -limit_low, or
    KL <= limit_low or p >= q. `clip_high` and `clip_low` count the tokens left out.
    """
    z, adv = t.ratios()
    logps, old = masked(t.logps_CT, t.mask_CT), masked(t.old_CT, t.mask_CT)
    p, q = jnp.exp(logps), jnp.exp(old)
    if divergence == "tv":
        valid_pos, valid_neg = p - q <= limit_high, p - q >= -limit_low
    else:
        # 1e-8 keeps the logarithm finite where a probability rounds to 1.
        kl = q * (old - logps) + (1 - q) * jnp.log((1 - q + 1e-8) / (1 - p + 1e-8))
        valid_pos, valid_neg = (kl <= limit_high) | (p <= q), (kl <= limit_low) | (p >= q)
    # Only a move in the direction of the advantage is bounded; a token on its way back stays in the loss.
    valid = jnp.where(adv > 0, valid_pos, valid_neg)
    weight = stop_gradient(jnp.minimum(jnp.exp(z), ratio_max) * valid)
    sums = metric_sums(z, t.mask_CT, clip_high=~valid & (adv > 0), clip_low=~valid & (adv <= 0))
    return -adv * weight * logps, sums


def vespo(t: Terms) -> tuple[jax.Array, Metrics]:
    """VESPO (arXiv:2602.10693): -A stop_gradient(phi(w)) log pi, w the product of the row's ratios.

    phi(w) = w^k exp(lambda (1 - w)), (k, lambda) = (2, 3) for A >= 0 and (3, 2) for A < 0: 1 on policy, and 0 far from
    it on either side.
    """
    z, adv = t.ratios()
    # The least weight is 1e-8, as in TRL.
    log_w = jnp.clip(row_sum(z, t.mask_CT), math.log(1e-8), LOG_RATIO_CLAMP[1])
    k, rate = jnp.where(adv >= 0, 2.0, 3.0), jnp.where(adv >= 0, 3.0, 2.0)
    phi = stop_gradient(jnp.exp(k * log_w + rate * (1 - jnp.exp(log_w))))
    return -adv * phi * masked(t.logps_CT, t.mask_CT), metric_sums(z, t.mask_CT)


def gmpo(t: Terms, *, clip_low: float = 0.4, clip_high: float = 0.4, row_eps: float = 0.0) -> tuple[jax.Array, Metrics]:
    """GMPO (arXiv:2507.20673): -mean(A) exp(mean(u)) over the row's valid tokens, one value a row broadcast to [C, T].

    u = sign(A) min(sign(A) z, sign(A) clip(z, -clip_low, clip_high)). Aggregate with "sequence-mean-token-mean".
    row_eps is added to the row's length.
    """
    # Not clamped: exp is taken of a row's mean, and the clip bounds what enters it on one side.
    z, adv = t._replace(clamp=None).ratios()
    # The sign turns min into max for negative advantages: PPO's pessimistic branch, in log space.
    sign = jnp.sign(adv)
    u = sign * jnp.minimum(sign * z, sign * jnp.clip(z, -clip_low, clip_high))
    loss = -row_mean(adv, t.mask_CT, row_eps) * jnp.exp(row_mean(u, t.mask_CT, row_eps))
    sums = metric_sums(z, t.mask_CT, clip_high=(adv > 0) & (z > clip_high), clip_low=(adv < 0) & (z < -clip_low))
    return masked(jnp.broadcast_to(loss, z.shape), t.mask_CT), sums

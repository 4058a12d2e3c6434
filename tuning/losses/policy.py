"""Policy losses of RL fine-tuning: ratios, clipped surrogates, CISPO, REINFORCE.

Axes: B or C completions, T completion tokens. Each loss reads `Terms` and returns per-token losses [C, T], 0 where
masked, and a dict of metric *sums* (divide by `n_tokens` after summing over the step).
`rlhf.tuning.losses.aggregate.aggregate` makes a scalar of them. Importance weights for the gap between sampler and
trainer (`rlhf.tuning.losses.importance`) multiply the returned losses; KL and entropy terms are aggregated apart.

Losses with another trust region than the clip are in `rlhf.tuning.losses.policy_variants`.
"""

from typing import Literal, NamedTuple

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


class Terms(NamedTuple):
    """The arrays that a policy loss reads, all [C, T], and the limits of its log-ratios."""

    logps_CT: jax.Array
    old_CT: jax.Array
    """The policy at the start of the update; with one update per batch `stop_gradient(logps)`."""
    advantages_CT: jax.Array
    """Or [C]: the same for all tokens of a completion."""
    mask_CT: jax.Array
    """1 on tokens that count."""
    ref_CT: jax.Array | None = None
    """None without a reference."""
    marked_CT: jax.Array | float = 0.0
    """1 on the tokens that `Algorithm.mark` chose."""
    clamp: Clamp | None = LOG_RATIO_CLAMP
    """Limits of log-ratios."""

    def ratios(self, level: Ratio = "token") -> tuple[jax.Array, jax.Array]:
        """Log-ratios, as in `log_ratio`, and advantages of every token, both [C, T], 0 where masked."""
        z = log_ratio(self.logps_CT, self.old_CT, self.mask_CT, level=level, log_ratio_clamp=self.clamp)
        return z, masked(per_token(self.advantages_CT, z), self.mask_CT)


def clipped_surrogate(
    t: Terms,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    ratio: Ratio = "token",
) -> tuple[jax.Array, Metrics]:
    """PPO's clipped objective (arXiv:1707.06347), [C, T]: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)).

    `clip_high > clip_low` is clip-higher (DAPO). `dual_clip` c > 1 limits the loss of tokens with A < 0 to -A c
    (arXiv:1912.09729). `ratio` as in `log_ratio`.
    Metrics: `clip_high` (A > 0, r above the range), `clip_low` (A < 0, r below), `dual_clip`, `ratio`, `ratio_sq`,
    `approx_kl`, `n_tokens`.
    """
    z, adv = t.ratios(ratio)
    r = jnp.exp(z)
    plain, clipped = -adv * r, -adv * jnp.clip(r, 1 - clip_low, 1 + clip_high)
    # The pessimistic branch: clipping removes the gradient only where the move already goes with the advantage.
    loss = jnp.maximum(plain, clipped)
    capped = jnp.zeros_like(z)
    if dual_clip is not None:
        cap = -adv * dual_clip
        capped = (adv < 0) & (loss > cap)
        loss = jnp.where(adv < 0, jnp.minimum(loss, cap), loss)
    low, high = ((clipped > plain) & side for side in (adv < 0, adv > 0))
    return loss, metric_sums(z, t.mask_CT, clip_high=high, clip_low=low, dual_clip=capped)


def policy_gradient(t: Terms, *, ratio: Ratio = "token") -> tuple[jax.Array, Metrics]:
    """Importance-weighted policy gradient without clipping, [C, T]: -A r."""
    z, adv = t.ratios(ratio)
    return -adv * jnp.exp(z), metric_sums(z, t.mask_CT)


def reinforce(t: Terms) -> tuple[jax.Array, Metrics]:
    """REINFORCE (Williams, 1992), [C, T]: -A log pi. The ratio is a metric alone."""
    z, adv = t.ratios()
    return -adv * masked(t.logps_CT, t.mask_CT), metric_sums(z, t.mask_CT)


def cispo(t: Terms, *, weight_max: float, weight_min: float | None = None) -> tuple[jax.Array, Metrics]:
    """CISPO (arXiv:2506.13585), [C, T]: -stop_gradient(clip(r, weight_min, weight_max)) A log pi.

    The bounds are those of the weight itself, not distances from 1. Metrics as in `clipped_surrogate`: here
    `clip_high` and `clip_low` count weights that reached a bound.
    """
    z, adv = t.ratios()
    r = jax.lax.stop_gradient(jnp.exp(z))
    # The gradient flows through log pi alone, so a clipped token keeps one (PPO's clip would drop it).
    weight = clamp(r, (weight_min, weight_max))
    losses = -weight * adv * masked(t.logps_CT, t.mask_CT)
    return losses, metric_sums(z, t.mask_CT, clip_high=r > weight, clip_low=r < weight)

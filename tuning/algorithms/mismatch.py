"""How far the sampler's log-probabilities are from the trainer's, and the limit of that (R14)."""

from __future__ import annotations

import numpy as np

from tuning.algorithms.flat import Column
from tuning.algorithms.round_data import RoundData


class Mismatch(RuntimeError):
    """Sampler and trainer disagree by more than the settings allow."""


def mismatch_kl(data: RoundData, keep_N: np.ndarray, old: Column) -> float:
    """Mean k3 estimate of KL(mu || pi_old) over the sampled tokens of these completions, [N] bool; 0 without any."""
    total, count = 0.0, 0
    # By rows: arrays of all tokens would be as large as the round.
    for i in np.flatnonzero(keep_N).tolist():
        log_rho = (old.row(i) - data.mu[i])[data.mask_of(i)]
        # k3 = exp(x) - 1 - x; expm1 keeps it exact near 0, where a healthy mismatch is.
        total += float((np.expm1(log_rho) - log_rho).sum())
        count += len(log_rho)
    return total / max(count, 1)


def check_mismatch(kl: float, limit: float) -> None:
    """Raises Mismatch where `kl` exceeds `max_mismatch_kl`, or is no number."""
    if not kl <= limit:
        raise Mismatch(
            f"sampler and trainer disagree: mismatch KL {kl:.4f} is above max_mismatch_kl {limit}; compare dtypes "
            "(those of rl.rollout.engine too), let newer policies sample (a lower rl.staleness or "
            "rl.partial.max_lag, or more rl.partial.round_tokens), or raise the limit knowingly"
        )

"""How far the sampler's log-probabilities are from the trainer's, and the limit of that (R14)."""

from __future__ import annotations

from collections.abc import Mapping

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


DRIFT = 10.0
"""Limit of how far a policy may have moved from its sampler within a round, in limits of a mismatch: single steps of a
policy with little entropy have moved by one, without harm; rollouts of other weights are further away."""


def check_step(of_policy: Mapping[str, float], limit: float) -> None:
    """Raises Mismatch where a step whose log pi_old is the sampler's has rollouts that are by other weights."""
    if "mismatch_kl" in of_policy:
        check_mismatch(of_policy["mismatch_kl"], limit)
    elif not of_policy.get("drift_kl", 0.0) <= DRIFT * limit:
        raise Mismatch(
            f"a step's rollouts are of another policy, or the policy has moved too far from its sampler: drift KL "
            f"{of_policy['drift_kl']:.4f} is above {DRIFT:.0f} times max_mismatch_kl {limit}; see whether all rollouts "
            "of the round have the same policy (`rlhf audit`), learn in smaller steps "
            "(rl.update.optimizer.learning_rate), or raise the limit knowingly"
        )


def check_mismatch(kl: float, limit: float) -> None:
    """Raises Mismatch where `kl` exceeds `max_mismatch_kl`, or is no number."""
    if not kl <= limit:
        raise Mismatch(
            f"sampler and trainer disagree: mismatch KL {kl:.4f} is above max_mismatch_kl {limit}; compare dtypes "
            "(those of rl.rollout.engine too), let newer policies sample (a lower rl.staleness), or raise "
            "the limit knowingly"
        )

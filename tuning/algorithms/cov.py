"""Clip-Cov and KL-Cov (Cui et al., 2025, arXiv:2505.22617): entropy falls by few tokens, those of high covariance.

    cov_it = (A_it - mean A) (log pi_old(y_it) - mean log pi_old)            means over the tokens of the step
    clip-cov: GRPO's clipped loss, 0 on a random 0.02 % of the tokens, of those with 1 < cov_it < 5
    kl-cov:   loss_it = -r_it A_i + |log r_it| on the 0.2 % of the tokens with the highest cov_it, -r_it A_i elsewhere

Shares, range and the weight 1 of |log r| are the authors' (PRIME-RL/Entropy-Mechanism-of-RL). They take the covariance
of each micro-batch under the policy of that moment; here it is of the whole step under pi_old, so that a split of the
step changes nothing. Presets: `registry` (clip-cov, kl-cov).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, Terms, clipped, group_relative
from rlhf.tuning.losses.policy import Metrics, log_ratio, policy_gradient

CLIPPED, LOW, HIGH = 0.0002, 1.0, 5.0
HELD = 0.002
ROUNDING = 1e-5


def algorithm(objective: Objective) -> Algorithm:
    """Clip-Cov, or KL-Cov."""
    plain = clipped(objective)

    def clip_cov(t: Terms) -> tuple[jax.Array, Metrics]:
        losses, sums = plain(t)
        return losses * (1 - t.marked_CT), sums

    def kl_cov(t: Terms) -> tuple[jax.Array, Metrics]:
        losses, sums = policy_gradient(t)
        z = jnp.abs(log_ratio(t.logps_CT, t.old_CT, t.mask_CT))
        # Before the first step a ratio is 1 but for rounding, whose sign would be a gradient of full size.
        return losses + t.marked_CT * jnp.where(z > ROUNDING, z, 0.0), sums

    of, mark = (clip_cov, _in_range) if objective.algorithm == "clip-cov" else (kl_cov, _highest)
    return Algorithm(group_relative(objective.normalisation), of, mark=mark)


def _covariance(advantages: np.ndarray, logps: np.ndarray) -> np.ndarray:
    return (advantages - advantages.mean()) * (logps - logps.mean())


def _in_range(advantages: np.ndarray, logps: np.ndarray) -> np.ndarray:
    covariance = _covariance(advantages, logps)
    inside = np.flatnonzero((covariance > LOW) & (covariance < HIGH))
    # At random, and the same whenever this step is repeated.
    return _first(np.random.default_rng(len(logps)).permutation(inside), CLIPPED, len(logps))


def _highest(advantages: np.ndarray, logps: np.ndarray) -> np.ndarray:
    return _first(np.argsort(-_covariance(advantages, logps), kind="stable"), HELD, len(logps))


def _first(numbers: np.ndarray, share: float, count: int) -> np.ndarray:
    """True for the first of these tokens: this share of `count`, one at least."""
    return np.isin(np.arange(count), numbers[: max(1, int(share * count))])

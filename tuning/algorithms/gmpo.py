"""GMPO (Zhao et al., 2025, arXiv:2507.20673): GRPO with the geometric mean of the tokens' clipped ratios.

    loss = -A exp(mean_t u_t),   u_t = sign(A) min(sign(A) z_t, sign(A) clip(z_t, -clip_low, clip_high)),   z = log r

Each token is clipped before the mean, so one outlier cannot move the whole completion. clip_low and clip_high are
distances of log r from 0. Settings: the presets of `rlhf.tuning.algorithms.registry`.
"""

from __future__ import annotations

import functools

from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, group_relative
from rlhf.tuning.losses.policy_variants import gmpo


def algorithm(objective: Objective) -> Algorithm:
    """GMPO with group-relative advantages."""
    loss = functools.partial(gmpo, clip_low=objective.clip_low, clip_high=objective.clip_high)
    return Algorithm(group_relative(objective.normalisation), loss)

"""SAPO (Gao et al., 2025, arXiv:2511.20347): a smooth gate in place of the clip, narrower for negative advantages.

    loss_t = -A (4 / tau) sigmoid(tau (r_t - 1)),   tau = 1 where A > 0, else 1.05

Advantages are those of GRPO. The gate's slope at r = 1 is 1, as that of the clipped loss, and falls smoothly on both
sides. Settings: the presets of `rlhf.tuning.algorithms.registry`.
"""

from __future__ import annotations

from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, group_relative
from rlhf.tuning.losses.policy_variants import sapo


def algorithm(objective: Objective) -> Algorithm:
    """SAPO with group-relative advantages."""
    return Algorithm(group_relative(objective.normalisation), sapo)

"""SAPO (Gao et al., 2025, arXiv:2511.20347): a smooth gate in place of the clip, narrower for negative advantages.

    loss_t = -A (4 / tau) sigmoid(tau (r_t - 1)),   tau = 1 where A > 0, else 1.05

Advantages are those of GRPO. The gate's slope at r = 1 is 1, as that of the clipped loss, and falls smoothly on both
sides. Settings: the presets of `rlhf.tuning.algorithms.registry`.
"""

from __future__ import annotations

import jax

from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, Terms, group_relative
from rlhf.tuning.losses.policy import Metrics
from rlhf.tuning.losses.policy_variants import sapo


def algorithm(objective: Objective) -> Algorithm:
    """SAPO with group-relative advantages."""

    def surrogate(t: Terms) -> tuple[jax.Array, Metrics]:
        return sapo(t.logps_CT, t.old_CT, t.advantages_CT, t.mask_CT)

    return Algorithm(group_relative(objective.normalisation), surrogate)

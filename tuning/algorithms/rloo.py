"""RLOO (Ahmadian et al., 2024, arXiv:2402.14740): a completion against the mean of the others, KL in the reward.

    A_i = R_i - mean of R_j over the other completions j of the prompt
    loss_i = -min(r_i A_i, clip(r_i) A_i), r_i = prod_t pi(y_it) / pi_old(y_it)

Presets: `registry` (rloo).

A completion is one action: its ratio is the product over its tokens, and each completion weighs the same.
"""

from __future__ import annotations

import jax

from rlhf.tuning.algorithms.advantages import rloo_advantages
from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, Scored, clipped


def algorithm(objective: Objective) -> Algorithm:
    """RLOO with one clipped ratio a completion."""

    def advantages(scored: Scored) -> jax.Array:
        return rloo_advantages(scored.rewards_N, scored.groups_N, valid=scored.valid_N)

    return Algorithm(advantages, clipped(objective))

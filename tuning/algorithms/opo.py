"""OPO (Hao et al., 2025, arXiv:2505.23585): exact on-policy policy gradient with the baseline of least variance.

    loss_t = -r_t (R - b),   b = sum_i L_i R_i / sum_i L_i over the prompt's completions of lengths L_i

A completion's gradient varies with its length, so longer ones weigh more in the baseline. There is no clip: a round is
one step (`registry`, on_policy). Settings: `rlhf.tuning.algorithms.registry`.
"""

from __future__ import annotations

import jax

from rlhf.tuning.algorithms.advantages import opo_advantages
from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, Scored
from rlhf.tuning.losses.policy import policy_gradient


def algorithm(objective: Objective) -> Algorithm:
    """OPO: the policy gradient on rewards relative to the length-weighted baseline."""
    return Algorithm(_advantages, policy_gradient)


def _advantages(scored: Scored) -> jax.Array:
    return opo_advantages(scored.rewards_N, scored.groups_N, scored.mask.sums_N, valid=scored.valid_N)

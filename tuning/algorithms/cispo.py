"""CISPO (MiniMax, 2025, arXiv:2506.13585): the clipped ratio is a weight without gradient, so no token is left out.

    w_it = stop_gradient(clip(r_it, 1 - clip_low, 1 + clip_high))
    loss_it = -w_it A_i log pi(y_it)                                  A_i as in GRPO

Presets: `registry` (cispo).
"""

from __future__ import annotations

import jax

from rlhf.tuning.algorithms.algorithm import Algorithm, Terms, group_relative
from rlhf.tuning.algorithms.settings import Objective
from rlhf.tuning.losses.policy import Metrics, cispo


def algorithm(objective: Objective) -> Algorithm:
    """CISPO with weights between 1 - clip_low and 1 + clip_high; with clip_low 1 there is no lower bound."""

    def surrogate(t: Terms) -> tuple[jax.Array, Metrics]:
        low = 1 - objective.clip_low
        return cispo(
            t.logps_CT,
            t.old_CT,
            t.advantages_CT,
            t.mask_CT,
            weight_max=1 + objective.clip_high,
            weight_min=low if low > 0 else None,
        )

    return Algorithm(group_relative(objective.normalisation), surrogate)

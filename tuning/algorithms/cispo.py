"""CISPO (MiniMax, 2025, arXiv:2506.13585): the clipped ratio is a weight without gradient, so no token is left out.

    w_it = stop_gradient(clip(r_it, 1 - clip_low, 1 + clip_high))
    loss_it = -w_it A_i log pi(y_it)                                  A_i as in GRPO

Presets: `registry` (cispo).
"""

from __future__ import annotations

import functools

from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, group_relative
from rlhf.tuning.losses.policy import cispo


def algorithm(objective: Objective) -> Algorithm:
    """CISPO with weights between 1 - clip_low and 1 + clip_high; with clip_low 1 there is no lower bound."""
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    loss = functools.partial(cispo, weight_max=high, weight_min=low if low > 0 else None)
    return Algorithm(group_relative(objective.normalisation), loss)

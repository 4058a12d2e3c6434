"""GSPO (Zheng et al., 2025, arXiv:2507.18071): one clipped ratio a sequence, the geometric mean of its tokens' ratios.

    s_i = exp(mean_t log pi(y_it) / pi_old(y_it))                     ratio of completion i
    loss_i = -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)
    loss = mean_i loss_i                                              A_i as in GRPO

Presets: `registry` (gspo, gspo-token).

GSPO-token has the same value; each token's gradient is its own, which lets advantages differ within a sequence.
"""

from __future__ import annotations

from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, clipped, group_relative


def algorithm(objective: Objective) -> Algorithm:
    """GSPO, or GSPO-token: they differ in the kind of ratio."""
    return Algorithm(group_relative(objective.normalisation), clipped(objective))

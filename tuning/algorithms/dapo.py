"""DAPO (Yu et al., 2025, arXiv:2503.14476): GRPO with a clip range that is wider above, without KL.

    A_i = (R_i - mean_group(R)) / std_group(R)
    loss_it = -rho_it min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i)     clip_low 0.2 < clip_high 0.28
    loss = sum_it loss_it / tokens of the step                                       every token weighs the same

Its other two parts are settings of the rounds: `rl.refills` samples other prompts in place of those whose completions
all score alike, and the reward function `overlong` lowers the reward in the last tokens before the limit. The formula
is GRPO's; `registry` (dapo) has the presets that make the difference.
"""

from __future__ import annotations

from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, clipped, group_relative


def algorithm(objective: Objective) -> Algorithm:
    """The same as GRPO; the presets make the difference."""
    return Algorithm(group_relative(objective.normalisation), clipped(objective))

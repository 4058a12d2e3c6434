"""GRPO (Shao et al., 2024, arXiv:2402.03300): rewards relative to the group of their prompt, clipped. No critic.

    A_i = (R_i - mean_group(R)) / std_group(R)                                   advantage of completion i
    r_it = pi(y_it) / pi_old(y_it)                                               ratio of token t
    loss_it = -rho_it min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i)
    loss = mean_i mean_t loss_it + kl_coef KL(pi || pi_ref)

The mean over the tokens of each completion is the paper's (`aggregation: sequence-mean-token-mean`); DAPO's is over the
tokens of the step (`token-mean`). rho_it corrects for the sampler (`objective.correction_weights`). Dr. GRPO
(Liu et al., 2025, arXiv:2503.20783) leaves out the division by the spread, and divides the sum by completions x
`constant`: both divisions favour some questions and lengths over others. Settings: `settings.Objective`; presets:
`registry` (grpo, dr-grpo).
"""

from __future__ import annotations

from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, clipped, group_relative


def algorithm(objective: Objective) -> Algorithm:
    """GRPO, or Dr. GRPO by its presets."""
    return Algorithm(group_relative(objective.normalisation), clipped(objective))

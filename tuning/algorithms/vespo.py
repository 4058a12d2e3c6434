"""VESPO (Shen et al., 2026, arXiv:2602.10693): a soft weight of the whole completion in place of a clip.

    w_i = prod_t pi(y_it) / mu(y_it),   phi(w) = w^k exp(lambda (1 - w))
    loss_it = -A_i stop_gradient(phi(w_i)) log pi(y_it)            A_i as in GRPO; mean over the tokens of the step

k and lambda are TRL's: 2 and 3 where A >= 0, 3 and 2 where A < 0. The ratio is to the sampler, whose mismatch TRL
multiplies into w too. Presets: `registry` (vespo).
"""

from __future__ import annotations

from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, group_relative
from rlhf.tuning.losses.policy_variants import vespo


def algorithm(objective: Objective) -> Algorithm:
    """VESPO with group-relative advantages."""
    return Algorithm(group_relative(objective.normalisation), vespo)

"""GRPO (Shao et al., 2024, arXiv:2402.03300): rewards against mean and spread of their group, clipped. No critic.

Dr. GRPO (Liu et al., 2025, arXiv:2503.20783) is this without the division by the spread, its loss divided by a
constant budget of tokens: both divisions favour some questions and lengths over others.
"""

from __future__ import annotations

from tuning.algorithms.algorithm import Algorithm, clipped, group_relative
from tuning.algorithms.settings import Objective


def algorithm(objective: Objective) -> Algorithm:
    return Algorithm(group_relative(objective.normalisation), clipped(objective))

"""DAPO (Yu et al., 2025, arXiv:2503.14476): GRPO whose clip range is wider above, as a mean over tokens, without KL.

Its other two parts are settings of the rounds: `rl.refills` samples other prompts in place of those whose completions
all score alike, and the reward function `overlong` lowers the reward in the last tokens before the limit.
"""

from __future__ import annotations

from tuning.algorithms.algorithm import Algorithm, clipped, group_relative
from tuning.algorithms.settings import Objective


def algorithm(objective: Objective) -> Algorithm:
    return Algorithm(group_relative(objective.normalisation), clipped(objective))

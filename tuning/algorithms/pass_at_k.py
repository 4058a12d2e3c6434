"""Pass@k training (Tang et al., 2025, arXiv:2503.19595): a prompt is worth its best completion.

    A = (R - second best of the group) / (std + eps) for the best completion, 0 for the others; the loss is GRPO's clip

The best of a group adds to the group's maximum exactly its lead over the second best. A tie at the top has no lead.
Presets: none; the defaults of `settings.Objective`.
"""

from __future__ import annotations

import jax

from rlhf.tuning.algorithms.advantages import passk_advantages
from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, Scored, clipped


def algorithm(objective: Objective) -> Algorithm:
    """Pass@k credit with PPO's clipped surrogate."""

    def advantages(scored: Scored) -> jax.Array:
        return passk_advantages(scored.rewards_N, scored.groups_N, valid=scored.valid_N)

    return Algorithm(advantages, clipped(objective))

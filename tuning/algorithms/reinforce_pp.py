"""REINFORCE++ (Hu et al., 2025, arXiv:2501.03262): PPO's clipped loss, advantages whitened over the round, no critic.

    global:    A_it = whiten(sum of rewards from token t on)      reward_it = -kl_in_reward KL_it, the score on the last
    baseline:  A_it = whiten(R_i - mean_group(R))
    loss_it = -min(r_it A_it, clip(r_it) A_it)

Presets: `registry` (reinforce-pp, reinforce-pp-baseline).

The global form whitens the reward-to-go of every token, the KL inside. The form with a baseline takes the group's
mean off first, then whitens over tokens; its KL is a loss (k2).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.algorithms.advantages import reinforce_pp_baseline_advantages
from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, Scored, clipped, every_valid
from rlhf.tuning.algorithms.flat import Column, whiten
from rlhf.tuning.losses.returns import reward_to_go
from rlhf.tuning.precision import real


def algorithm(objective: Objective) -> Algorithm:
    """REINFORCE++, or with the group's mean as a baseline."""
    # Both whiten over the round, so a completion of a group of equal rewards is below or above the round's mean.
    advantages = _global if objective.algorithm == "reinforce-pp" else _baseline
    return Algorithm(advantages, clipped(objective), keep=every_valid)


def _global(scored: Scored) -> Column:
    returns = Column.zeros(scored.mask.lengths_N, scored.mask.width, real())
    for rows in returns.blocks():
        some = scored[rows]
        returns.put(rows, np.asarray(reward_to_go(some.rewards_NT, jnp.asarray(some.mask_NT))))
    whiten(returns, scored.mask)
    return returns


def _baseline(scored: Scored) -> jax.Array:
    return reinforce_pp_baseline_advantages(
        scored.rewards_N, scored.groups_N, jnp.asarray(scored.mask_NT), valid=jnp.asarray(scored.valid_N)
    )

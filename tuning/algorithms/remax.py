"""ReMax (Li et al., 2023, arXiv:2310.10505): REINFORCE against the reward of the prompt's greedy completion.

    A_it = sum of rewards from token t on - R(greedy completion of the prompt)
    loss_it = -min(r_it A_it, clip(r_it) A_it)

Presets: `registry` (remax).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, Scored, clipped
from rlhf.tuning.losses.returns import remax_advantages
from rlhf.tuning.precision import real


def algorithm(objective: Objective) -> Algorithm:
    """The clip matters only where a round takes several steps."""
    return Algorithm(_advantages, clipped(objective), keep=_keep)


def _greedy(scored: Scored) -> np.ndarray:
    if scored.greedy_N is None:
        raise ValueError("remax needs the reward of a greedy completion of each prompt: give `greedy` to the round")
    return scored.greedy_N


def _keep(scored: Scored) -> np.ndarray:
    return scored.valid_N & np.isfinite(_greedy(scored))


def _advantages(scored: Scored) -> jax.Array:
    # NaN only where `_keep` drops the completion: its advantage is not used.
    greedy = jnp.asarray(np.nan_to_num(_greedy(scored)), real())
    return remax_advantages(scored.rewards_NT, greedy, jnp.asarray(scored.mask_NT))[0]

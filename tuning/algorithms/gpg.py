"""GPG (Chu et al., 2025, arXiv:2504.02546): plain policy gradient against the group's mean; no ratio, clip or KL.

    loss_t = -alpha (R - mean_group) log pi_t,   alpha = completions / completions of non-zero reward

alpha makes up for completions of reward 0, which would lower the mean gradient. Settings: the presets of
`tuning.algorithms.registry`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tuning.algorithms.advantages import gpg_advantages
from tuning.algorithms.algorithm import Algorithm, Objective, Scored, Terms
from tuning.losses.policy import Metrics, log_ratio, metric_sums, reinforce


def algorithm(objective: Objective) -> Algorithm:
    """GPG: REINFORCE on rewards relative to the group."""

    def surrogate(t: Terms) -> tuple[jax.Array, Metrics]:
        losses, _ = reinforce(t.logps_CT, t.advantages_CT, t.mask_CT)
        # The loss has no ratio; the report shows how far several steps of a round moved the policy all the same.
        return losses, metric_sums(log_ratio(t.logps_CT, t.old_CT, t.mask_CT), t.mask_CT)

    return Algorithm(_advantages, surrogate)


def _advantages(scored: Scored) -> jax.Array:
    return gpg_advantages(scored.rewards_N, jnp.asarray(scored.groups_N), valid=jnp.asarray(scored.valid_N))

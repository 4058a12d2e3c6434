"""GPG (Chu et al., 2025, arXiv:2504.02546): plain policy gradient against the group's mean; no ratio, clip or KL.

    loss_t = -alpha (R - mean_group) log pi_t,   alpha = B / (B - M)

Of the B completions of a round M are in groups of equal rewards, which have no gradient but count in the mean over
tokens: alpha makes up for them. With `tied_groups: drop` they do not count, and alpha is 1. verl's port takes the
completions of reward 0 for M, so that its result depends on the zero of the rewards. There is no ratio: a round is one
step (`registry`, on_policy). Settings: the presets of `registry`.
"""

from __future__ import annotations

import jax

from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, Scored, group_relative, informative
from rlhf.tuning.losses.policy import reinforce


def algorithm(objective: Objective) -> Algorithm:
    """GPG: REINFORCE on rewards relative to the group."""

    def advantages(scored: Scored) -> jax.Array:
        centred = group_relative("none")(scored)
        if objective.tied_groups == "drop":
            return centred
        return centred * (scored.valid_N.sum() / max(informative(scored).sum(), 1))

    return Algorithm(advantages, reinforce)

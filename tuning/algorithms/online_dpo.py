"""Online DPO (Guo et al., 2024, arXiv:2402.04792): of each group the best completion is preferred to the worst.

    loss = mean over prompts of -log sigmoid(beta (log pi/pi_ref (best) - log pi/pi_ref (worst)))

Settings: `beta`; presets: `registry` (online-dpo).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, Scored, Terms, informative
from rlhf.tuning.losses.masks import masked
from rlhf.tuning.losses.policy import Metrics, log_ratio, metric_sums
from rlhf.tuning.losses.preference import dpo, sequence_logps


def algorithm(objective: Objective) -> Algorithm:
    """The loss of a pair is the value of every token of both, so that the mean over sequences is that over pairs."""

    def surrogate(t: Terms) -> tuple[jax.Array, Metrics]:
        if t.ref_CT is None:
            raise ValueError("online-dpo needs the reference's log-probabilities")
        # A pair is in slots 2b and 2b + 1, in table order: the sign of the advantage says which is the best.
        logps, ref = (sequence_logps(x, t.mask_CT).reshape(-1, 2) for x in (t.logps_CT, t.ref_CT))
        first_is_best = masked(t.advantages_CT, t.mask_CT).sum(-1).reshape(-1, 2)[:, 0] >= 0
        chosen, ref_chosen = (jnp.where(first_is_best, x[:, 0], x[:, 1]) for x in (logps, ref))
        rejected, ref_rejected = (jnp.where(first_is_best, x[:, 1], x[:, 0]) for x in (logps, ref))
        losses = dpo(chosen, rejected, ref_chosen, ref_rejected, beta=objective.beta).loss_B
        z = log_ratio(t.logps_CT, t.old_CT, t.mask_CT)
        # The mean over a sequence's equal tokens is the loss of the pair, and so is the mean over both.
        return masked(jnp.repeat(losses, 2)[:, None], t.mask_CT), metric_sums(z, t.mask_CT)

    return Algorithm(_sides, surrogate, keep=lambda scored: np.asarray(_sides(scored)) != 0, paired=True)


def _sides(scored: Scored) -> jax.Array:
    """1 for the best of each informative group, -1 for the worst, 0 for the others; the first of equal ones."""
    keep, sides = informative(scored), np.zeros(len(scored.totals_N), np.float32)
    rewards = np.asarray(scored.rewards_N)
    for group in np.unique(scored.groups_N[keep]):
        members = np.flatnonzero((scored.groups_N == group) & keep)
        sides[members[np.argmax(rewards[members])]] = 1
        sides[members[np.argmin(rewards[members])]] = -1
    return jnp.asarray(sides)

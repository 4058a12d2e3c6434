"""DPPO (Qi et al., 2026, arXiv:2602.04879): the trust region is on the token's probability, not on its ratio.

    loss_t = -A stop_gradient(min(r_t, 10000) [t within the region]) log pi_t

With p = pi_t and q the sampler's probability, a token leaves the loss where it has moved further than clip_high (A > 0)
or clip_low (A < 0) in the direction of its advantage. `dppo` measures the move as p - q (binary total variation),
`dppo-kl` as the KL of the two Bernoulli distributions. A ratio clip stops rare tokens early and common ones late; this
one does not. The ratio is to the sampler too, and its bound is that of the authors' script: a low one is biased.
`old_logps: trainer` puts the region around the recomputed policy, the authors' ablation `recompute`. Settings: the
presets of `rlhf.tuning.algorithms.registry`.
"""

from __future__ import annotations

import functools

from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, group_relative
from rlhf.tuning.losses.policy_variants import dppo

RATIO_MAX = 10_000.0


def algorithm(objective: Objective) -> Algorithm:
    """DPPO by total variation, or as `dppo-kl` by the KL."""
    loss = functools.partial(
        dppo,
        divergence="kl" if objective.algorithm == "dppo-kl" else "tv",
        limit_low=objective.clip_low,
        limit_high=objective.clip_high,
        ratio_max=RATIO_MAX,
    )
    return Algorithm(group_relative(objective.normalisation), loss)

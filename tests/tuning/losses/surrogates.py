"""Every surrogate and every aggregation, for tests of what holds for all of them."""

from collections.abc import Callable
from functools import partial

import jax

from rlhf.tuning.losses import policy, policy_variants

Loss = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
OF_TERMS = {
    "clip": partial(policy.clipped_surrogate, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "gspo": partial(policy.clipped_surrogate, clip_low=0.03, clip_high=0.05, ratio="sequence"),
    "gspo-token": partial(policy.clipped_surrogate, clip_low=0.03, clip_high=0.05, ratio="sequence-token"),
    "pg": policy.policy_gradient,
    "reinforce": policy.reinforce,
    "cispo": partial(policy.cispo, weight_max=1.28),
    "sapo": policy_variants.sapo,
    "dppo-tv": partial(policy_variants.dppo, divergence="tv", limit_low=0.15, limit_high=0.2),
    "dppo-kl": partial(policy_variants.dppo, divergence="kl", limit_low=0.15, limit_high=0.2),
    "gmpo": policy_variants.gmpo,
}
LOSSES: dict[str, Loss] = {name: lambda *arrays, f=f: f(policy.Terms(*arrays)) for name, f in OF_TERMS.items()}
MODES = ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant", "token-sum"]

"""The policy objective: surrogate, importance correction, KL and entropy, each divided by counts of the whole step.

Axes: C completions of a micro-batch, T completion tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf.tuning.algorithms.algorithm import Algorithm, Terms
from rlhf.tuning.algorithms.settings import Objective
from rlhf.tuning.device import Compute
from rlhf.tuning.losses.aggregate import aggregate
from rlhf.tuning.losses.importance import gated_weights, importance_weights, log_ratio_bins, mismatch_metrics
from rlhf.tuning.losses.kl import kl_per_token
from rlhf.tuning.losses.masks import masked
from rlhf.tuning.losses.policy import Metrics, metric_sums
from rlhf.tuning.precision import real
from rlhf.tuning.training.forward import logps_entropy_and_router, share_of_balance
from rlhf.tuning.training.step import Batch, LossFn, Tree


def correction_weights(objective: Objective, old_CT: jax.Array, mu_CT: jax.Array, mask_CT: jax.Array) -> jax.Array:
    """Weights rho = pi_old / mu of sampled tokens, [C, T], 0 where masked; no gradient (R4).

    truncate: min(rho, max). mask: rho within [min, max], else 0 (IcePop, arXiv:2510.18855). sequence: the product over
    the completion, at most max. sequence-mask: rho where the completion's geometric mean lies within [min, max],
    else 0.
    """
    low, high, given = objective.importance_min, objective.importance_max, (old_CT, mu_CT, mask_CT)
    match objective.correction:
        case "none":
            return masked(jnp.ones_like(old_CT), mask_CT)
        case "sequence-mask":
            return gated_weights(*given, band=(low, high))
        case "mask":
            return importance_weights(*given, weight_min=low, weight_max=high, outside="zero")
        case kind:
            return importance_weights(*given, level="sequence" if kind == "sequence" else "token", weight_max=high)


def kl_loss(objective: Objective, logps_CT: jax.Array, ref_CT: jax.Array, mask_CT: jax.Array) -> jax.Array:
    """KL to the reference of every token, [C, T]; k3-k2 has the value of k3 and the gradient of k2 (R8)."""
    kind = "k3" if objective.kl_kind == "k3-k2" else objective.kl_kind
    limit = objective.kl_clamp
    return kl_per_token(
        logps_CT,
        ref_CT,
        kind,
        mask_BT=mask_CT,
        value_clamp=None if limit is None else (-limit, limit),
        straight_through="k2" if objective.kl_kind == "k3-k2" else None,
    )


def policy_loss(graph: Any, algorithm: Algorithm, objective: Objective, compute: Compute) -> LossFn:
    """The loss of a micro-batch with `advantages_CT`, `mu_CT` (sampler) and, where present, `old_CT` and `ref_CT`.

    Without `old_CT` the batch gets one update and pi_old is stop_gradient(pi) (R4). The scalars `kl_scale` and
    `entropy_coef` of the batch, 1 and the objective's own where absent, let a run adapt both without compiling again.

    The sums of sampler and trainer are of pi_old, or where that is the sampler's (`old_logps`) of pi.
    """

    def loss(params: Tree, batch: Batch, frozen: Tree) -> tuple[jax.Array, Batch]:
        mask = batch["mask_CT"]
        logps, entropy, router = logps_entropy_and_router(graph, params, batch, objective.temperature, compute)
        # In a single update pi is pi_old: the value of a ratio is 1, and its gradient that of log pi.
        old = batch.get("old_CT", jax.lax.stop_gradient(logps))
        terms = Terms(logps, old, batch["advantages_CT"], mask, batch.get("ref_CT"), batch.get("marked_CT", 0.0))

        def total(x_CT: jax.Array) -> jax.Array:
            return aggregate(
                x_CT,
                mask,
                objective.aggregation,
                n_tokens=batch["n_tokens"],
                n_sequences=batch["n_completions"],
                constant=objective.constant,
            )

        surrogate, sums = _surrogate(objective.algorithm, algorithm, terms)
        # Denominators, KL and entropy are of all tokens.
        surrogate = surrogate * batch.get("top_CT", 1.0)
        # The correction multiplies outside the surrogate: a clip compares pi with pi_old, not with mu.
        value = total(surrogate * correction_weights(objective, old, batch["mu_CT"], mask))
        begun = jax.lax.stop_gradient(logps) if objective.old_logps == "sampler" else old
        sums = dict(sums) | {f"old_{k}": v for k, v in mismatch_metrics(begun, batch["mu_CT"], mask).items()}
        sums |= log_ratio_bins(begun, batch["mu_CT"], mask)
        sums["entropy"] = masked(entropy, mask).sum()
        if "ref_CT" in batch:
            kl = kl_loss(objective, logps, batch["ref_CT"], mask)
            sums["ref_kl"] = masked(kl, mask).sum()
            # With weight 0 the KL is a metric only.
            if objective.kl_coef > 0:
                value = value + objective.kl_coef * batch.get("kl_scale", 1.0) * total(kl)
        if objective.entropy_coef > 0 or objective.entropy_target is not None:
            # A bonus: subtracted from the loss.
            value = value - batch.get("entropy_coef", objective.entropy_coef) * total(entropy)
        if objective.router_aux > 0:
            value = value + objective.router_aux * share_of_balance(router, batch)
        sums |= router[1]
        return value, {k: jnp.asarray(v, real()) for k, v in sums.items()}

    return loss


def _surrogate(name: str, algorithm: Algorithm, terms: Terms) -> tuple[jax.Array, Metrics]:
    """The surrogate's losses and sums, with the sums that every metric needs.

    Raises ValueError for losses of another shape, which would be broadcast over tokens.
    """
    losses, sums = algorithm.surrogate(terms)
    if jnp.shape(losses) != terms.mask_CT.shape:
        raise ValueError(
            f"algorithm {name!r}: the surrogate returned losses of shape {jnp.shape(losses)}, expected one of each "
            f"token, {terms.mask_CT.shape}"
        )
    return losses, metric_sums(terms.ratios()[0], terms.mask_CT) | dict(sums)

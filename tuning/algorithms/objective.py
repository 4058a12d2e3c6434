"""The policy objective: surrogate, importance correction, KL and entropy, each divided by counts of the whole step.

Axes: C completions of a micro-batch, T completion tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tuning.losses.aggregate import Aggregation, aggregate
from tuning.losses.importance import importance_weights, mismatch_metrics
from tuning.losses.kl import KLKind, kl_per_token
from tuning.losses.policy import clipped_surrogate
from tuning.training.forward import Compute, logps_and_entropy
from tuning.training.step import LossFn


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is maximised."""

    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: Aggregation = "token-mean"
    constant: float | None = None
    kl_coef: float = 0.0
    kl_kind: KLKind = "k3"
    entropy_coef: float = 0.0
    importance_max: float | None = 2.0


def policy_loss(graph: Any, objective: Objective, compute: Compute) -> LossFn:
    """The loss of a micro-batch with `advantages_CT`, `mu_CT` (sampler) and, where present, `old_CT` and `ref_CT`.

    Without `old_CT` the batch gets one update and pi_old is stop_gradient(pi) (R4).
    """

    def loss(params: Any, batch: dict[str, jax.Array], frozen: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        mask = batch["mask_CT"]
        logps, entropy = logps_and_entropy(graph, params, batch, objective.temperature, compute)
        old = batch.get("old_CT", jax.lax.stop_gradient(logps))

        def total(x_CT: jax.Array) -> jax.Array:
            return aggregate(
                x_CT,
                mask,
                objective.aggregation,
                n_tokens=batch["n_tokens"],
                n_sequences=batch["n_completions"],
                constant=objective.constant,
            )

        surrogate, sums = clipped_surrogate(
            logps,
            old,
            batch["advantages_CT"],
            mask,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            dual_clip=objective.dual_clip,
        )
        weights = importance_weights(old, batch["mu_CT"], mask, weight_max=objective.importance_max)
        value = total(surrogate * weights)
        sums = dict(sums) | {f"old_{k}": v for k, v in mismatch_metrics(old, batch["mu_CT"], mask).items()}
        sums["entropy"] = jnp.sum(jnp.where(mask > 0, entropy, 0.0))
        if "ref_CT" in batch:
            kl = kl_per_token(logps, batch["ref_CT"], objective.kl_kind, mask_BT=mask)
            sums["ref_kl"] = jnp.sum(jnp.where(mask > 0, kl, 0.0))
            if objective.kl_coef > 0:
                value = value + objective.kl_coef * total(kl)
        if objective.entropy_coef > 0:
            value = value - objective.entropy_coef * total(entropy)
        return value, {k: jnp.asarray(v, jnp.float32) for k, v in sums.items()}

    return loss


def summarise(sums: Mapping[str, float]) -> dict[str, float]:
    """Per-token means of a round's summed metrics (R19)."""
    n = max(sums["n_tokens"], 1.0)
    found = {
        "clip_fraction": (sums["clip_low"] + sums["clip_high"]) / n,
        "approx_kl": sums["approx_kl"] / n,
        "entropy": sums["entropy"] / n,
        "mismatch_kl": sums["old_mismatch_k3"] / n,
        "effective_sample_size": sums["old_weight"] ** 2 / max(sums["old_weight_sq"], 1e-12) / n,
    }
    if "ref_kl" in sums:
        found["kl"] = sums["ref_kl"] / n
    return found

"""Losses of supervised learning on packed rows: SFT on completions, and reward models on pairs.

Axes: C completions of a micro-batch, T completion tokens; completions 2b and 2b + 1 are pair b, the chosen one first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlhf.tuning.algorithms.preference import scorer
from rlhf.tuning.device import Compute
from rlhf.tuning.losses.aggregate import aggregate
from rlhf.tuning.losses.preference import bradley_terry
from rlhf.tuning.losses.sft import nll
from rlhf.tuning.mesh import mesh_of
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.experts import router_means
from rlhf.tuning.training.batch import Group
from rlhf.tuning.training.completions import per_completion
from rlhf.tuning.training.forward import Router, logps_and_leads, logps_entropy_and_router, scores, share_of_balance
from rlhf.tuning.training.step import Batch, LossFn, Tree


def sft_loss(
    graph: Any, compute: Compute, of_token: Any = nll, label_smoothing: float = 0.0, router_aux: float = 0.0
) -> LossFn:
    """The loss `of_token`, a function of log p, of the completion tokens, mean over the tokens of the step.

    label_smoothing e: with `nll` the cross-entropy to (1 - e) of the token and e of the whole vocabulary, evenly.
    router_aux: weight of the load-balancing loss of a mixture of experts, which has no label_smoothing then.
    """
    if label_smoothing and router_aux:
        raise ValueError(
            "label_smoothing is not for a model with output_router_logits: set one of the two to 0 or false"
        )

    def loss(params: Tree, batch: Batch, frozen: Tree) -> tuple[jax.Array, Batch]:
        router: Router = None, {}
        if label_smoothing:
            logps, leads = logps_and_leads(graph, params, batch, compute)
            losses = of_token(logps) + label_smoothing * leads
        else:
            logps, _, router = logps_entropy_and_router(graph, params, batch, 1.0, compute)
            losses = of_token(logps)
        mask, n = batch["mask_CT"], batch["n_tokens"]
        # A token mean reads no number of sequences.
        value = aggregate(losses, mask, "token-mean", n_tokens=n, n_sequences=jnp.ones(()))
        if router_aux:
            value = value + router_aux * share_of_balance(router, batch)
        # Log-probabilities are 0 where masked.
        return value, {"nll": -jnp.sum(logps), "tokens": jnp.sum(mask)} | router[1]

    return loss


def sft_summary(sums: dict[str, float]) -> dict[str, float]:
    """Metrics of a step from the sums of `sft_loss`."""
    return {"loss": sums["nll"] / sums["tokens"], "tokens": sums["tokens"]} | router_means(sums)


def heldout_loss(model: DecoderConfig, params: Any, examples: Sequence[Group], compute: Compute, budget: int) -> float:
    """-log p of the trained tokens of examples, mean over all of their tokens: the loss of SFT (R1).

    budget: row tokens of a micro-batch.
    """
    score = functools.partial(scorer(model, 1.0, compute), params)
    logps = per_completion(score, examples, budget, mesh=mesh_of(params))
    return float(-logps.sum() / sum(g.trained for g in examples))


def reward_loss(graph: Any, centering: float, compute: Compute) -> LossFn:
    """Bradley-Terry, mean over the pairs of the step: -log sigmoid(chosen - rejected - margin).

    The batch has `margin_C`, the pair's margin at both completions. `centering` weighs (chosen + rejected)^2, which
    holds scores near zero.
    """

    def loss(params: Tree, batch: Batch, frozen: Tree) -> tuple[jax.Array, Batch]:
        chosen, rejected = scores(graph, params, batch, compute).reshape(-1, 2).T
        valid = batch["mask_CT"][::2, 0] > 0
        # Both completions of a pair carry its margin: the first is enough.
        margin = batch["margin_C"][::2]
        # Empty slots read position 0 twice: their difference is 0 and finite, then masked.
        losses = jnp.where(valid, bradley_terry(chosen, rejected, margin, centering), 0.0)
        # A tie is half right: a new head scores all alike, which is chance.
        right = jnp.where(valid, (chosen > rejected) + 0.5 * (chosen == rejected), 0.0)
        value = jnp.sum(losses) / batch["n_groups"]
        return value, {"bt": jnp.sum(losses), "right": jnp.sum(right), "pairs": jnp.sum(valid)}

    return loss


def reward_summary(sums: dict[str, float]) -> dict[str, float]:
    """Metrics of a step from the sums of `reward_loss`."""
    return {"loss": sums["bt"] / sums["pairs"], "accuracy": sums["right"] / sums["pairs"]}

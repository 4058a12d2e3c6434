"""Losses of preference learning on packed rows: pairs after their common prompt, or completions with a label.

The formulas are in `rlhf.tuning.losses.preference`; here they get their log-probabilities, lengths and references.
Axes: C completions of a micro-batch, T completion tokens, B pairs; completions 2b and 2b + 1 are pair b.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.algorithms.settings import Preference
from rlhf.tuning.device import Compute
from rlhf.tuning.losses.preference import PairLoss, cpo, dpo, kto, ld_weights, mean_rows, orpo, sequence_logps
from rlhf.tuning.losses.sft import nll
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.training.forward import logps_and_entropy
from rlhf.tuning.training.step import Batch, LossFn, Tree

LARGEST_MEAN_LOGP = -1e-6
"""Bound of the mean log-probability in ORPO: at probability 1 the odds are infinite."""


def completion_logps(logps_CT: jax.Array, mask_CT: jax.Array, ld_alpha: float = 1.0) -> jax.Array:
    """log p of each completion, [C]. ld_alpha < 1 is the weight of tokens past the length of the pair's other side."""
    if ld_alpha < 1:
        # The other side of the pair: slots 2b and 2b + 1 exchanged.
        other_CT = mask_CT.reshape(-1, 2, mask_CT.shape[1])[:, ::-1].reshape(mask_CT.shape)
        logps_CT = logps_CT * ld_weights(mask_CT, other_CT, ld_alpha)
    return sequence_logps(logps_CT, mask_CT)


@functools.lru_cache(maxsize=8)
def scorer(model: DecoderConfig, ld_alpha: float, compute: Compute) -> Any:
    """A compiled (parameters, batch) -> `completion_logps`, [C]."""
    graph = decoder_graph(model)

    def score(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logps, _ = logps_and_entropy(graph, params, batch, 1.0, compute)
        return completion_logps(logps, batch["mask_CT"], ld_alpha)

    return jax.jit(score)


def pair_losses(
    p: Preference,
    logps_C: jax.Array,
    lengths_C: jax.Array,
    reference_C: jax.Array | None,
    whole_C: jax.Array | None = None,
) -> PairLoss:
    """Losses and implicit rewards of the pairs, [B], `sft_weight` times the mean token loss of the chosen included.

    whole_C: the completions' log-probabilities without `ld_alpha`; None: logps_C are those.
    """
    chosen, rejected = logps_C.reshape(-1, 2).T
    # Empty slots have length 0; their mean is masked later.
    lengths = jnp.maximum(lengths_C, 1).reshape(-1, 2).T
    means = chosen / lengths[0], rejected / lengths[1]
    shared: dict[str, Any] = {"beta": p.beta, "label_smoothing": p.label_smoothing}
    match p.loss:
        case "orpo":
            losses = orpo(*means, **shared, logp_max=LARGEST_MEAN_LOGP)
        case "simpo":
            losses = cpo(*means, **shared, loss="simpo", gamma=p.gamma)
        case "cpo":
            losses = cpo(chosen, rejected, **shared, loss="sigmoid")
        case name:
            assert reference_C is not None
            losses = dpo(
                chosen,
                rejected,
                *reference_C.reshape(-1, 2).T,
                **shared,
                loss="sigmoid" if name == "dpo" else name,  # type: ignore[arg-type]
                divergence=p.divergence,
                chosen_lengths_B=lengths[0] if p.average else None,
                rejected_lengths_B=lengths[1] if p.average else None,
            )
    if not p.sft_weight:
        return losses
    mean = means[0] if whole_C is None else whole_C.reshape(-1, 2)[:, 0] / lengths[0]
    return losses._replace(loss_B=losses.loss_B + p.sft_weight * nll(mean))


def preference_loss(graph: Any, p: Preference, compute: Compute) -> LossFn:
    """Mean over the step's pairs. The batch has `reference_C`, the reference's `completion_logps`, where p needs it."""

    def loss(params: Tree, batch: Batch, frozen: Tree) -> tuple[jax.Array, Batch]:
        mask = batch["mask_CT"]
        logps, _ = logps_and_entropy(graph, params, batch, 1.0, compute)
        logps_C = completion_logps(logps, mask, p.ld_alpha)
        lengths_C = jnp.sum(mask, axis=1)
        whole_C = completion_logps(logps, mask) if p.ld_alpha < 1 and p.sft_weight else None
        losses = pair_losses(p, logps_C, lengths_C, batch.get("reference_C"), whole_C)
        # Empty slots come in pairs: the first of the two decides.
        valid = (lengths_C.reshape(-1, 2)[:, 0] > 0).astype(jnp.float32)
        margins = losses.chosen_rewards_B - losses.rejected_rewards_B
        chosen, rejected = logps_C.reshape(-1, 2).T
        each = {
            "losses": losses.loss_B,
            # A tie is half right: before the first step policy and reference are one.
            "accuracy": (margins > 0) + 0.5 * (margins == 0),
            "margin": margins,
            "chosen_logps": chosen,
            "rejected_logps": rejected,
        }
        sums = {k: jnp.sum(jnp.where(valid > 0, v, 0.0)) for k, v in each.items()}
        return mean_rows(losses.loss_B, batch["n_groups"], valid), sums | {"pairs": jnp.sum(valid)}

    return loss


def pair_summary(sums: dict[str, float]) -> dict[str, float]:
    """Metrics of a step from the sums of `preference_loss`."""
    names = ("accuracy", "margin", "chosen_logps", "rejected_logps")
    return {"loss": sums["losses"] / sums["pairs"]} | {name: sums[name] / sums["pairs"] for name in names}


def unpaired_losses(
    p: Preference, logps_C: jax.Array, reference_C: jax.Array, label_C: jax.Array, kl: jax.Array | float
) -> tuple[jax.Array, jax.Array]:
    """KTO's losses and implicit rewards, both [C]."""
    return kto(
        logps_C,
        reference_C,
        label_C,
        kl,
        beta=p.beta,
        loss="kto" if p.loss == "kto" else "apo-zero-unpaired",
        desirable_weight=p.desirable_weight,
        undesirable_weight=p.undesirable_weight,
    )


def unpaired_loss(graph: Any, p: Preference, compute: Compute) -> LossFn:
    """Mean over the step's completions. The batch has `reference_C`, `label_C` (1: desirable) and the step's `kl`."""

    def loss(params: Tree, batch: Batch, frozen: Tree) -> tuple[jax.Array, Batch]:
        mask, good = batch["mask_CT"], batch["label_C"] > 0
        logps, _ = logps_and_entropy(graph, params, batch, 1.0, compute)
        losses, rewards = unpaired_losses(
            p, completion_logps(logps, mask), batch["reference_C"], batch["label_C"], batch["kl"]
        )
        valid = mask.any(axis=1)
        each: dict[str, Any] = {"losses": losses, "completions": 1.0, "kl": batch["kl"]}
        sums = {name: jnp.sum(jnp.where(valid, x, 0.0)) for name, x in each.items()}
        for name, mine in {"good": valid & good, "bad": valid & ~good}.items():
            sums |= {name: jnp.sum(jnp.where(mine, rewards, 0.0)), f"n_{name}": jnp.sum(jnp.where(mine, 1.0, 0.0))}
        return mean_rows(losses, batch["n_completions"], valid), sums

    return loss


def unpaired_summary(sums: dict[str, float]) -> dict[str, float]:
    """Metrics of a step from the sums of `unpaired_loss`; a kind that the step lacks has reward 0."""
    n = sums["completions"]
    good, bad = (sums[k] / max(sums[f"n_{k}"], 1.0) for k in ("good", "bad"))
    return {
        "loss": sums["losses"] / n,
        "margin": good - bad,
        "desirable_reward": good,
        "undesirable_reward": bad,
        "kl": sums["kl"] / n,
    }


def mismatched(prompts: Sequence[Any]) -> list[int]:
    """For each prompt the number of a later one that differs from it, whose completion serves KTO's reference point.

    Raises ValueError where all prompts are equal.
    """
    # A fixed choice, the next prompt that differs, so that the data of a run does not depend on a seed.
    n = len(prompts)
    if all(p == prompts[0] for p in prompts):
        raise ValueError("KTO's reference point needs completions of other prompts, but all prompts of the data agree")
    return [next((i + k) % n for k in range(1, n) if prompts[(i + k) % n] != prompts[i]) for i in range(n)]


def chance_above(good: np.ndarray, bad: np.ndarray) -> float:
    """The chance that one of `good` is larger than one of `bad`, ties half (the area under the ROC curve)."""
    ordered = np.sort(bad)
    # Left counts the smaller ones, right adds the equal ones: their mean counts a tie as half.
    below = np.searchsorted(ordered, good, "left") + np.searchsorted(ordered, good, "right")
    return float(below.mean() / (2 * len(ordered)))

"""Preference losses: reward models, the DPO family, reference-free losses (ORPO, SimPO, CPO), KTO.

Axes: B pairs (or samples for KTO), T tokens. Sequence log-probabilities come from `sequence_logps`. Every loss is
per pair, [B]; average with `mean_rows` over the pairs of the whole step. The caller keeps the
reference's log-probabilities constant (`stop_gradient`); the losses do not.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import log_sigmoid, sigmoid

from rlhf.tuning.losses.aggregate import Count
from rlhf.tuning.losses.masks import masked, row_mean, row_sum

DPOLoss = Literal[
    "sigmoid", "hinge", "ipo", "robust", "exo-pair", "nca-pair", "sppo-hard", "apo-zero", "apo-down", "discopop",
]  # fmt: skip
Divergence = Literal["reverse-kl", "forward-kl", "js"]


class PairLoss(NamedTuple):
    """Per-pair losses and the implicit rewards of both sides (no gradient), all [B]."""

    loss_B: jax.Array
    chosen_rewards_B: jax.Array
    rejected_rewards_B: jax.Array

    @classmethod
    def of(cls, loss_B: jax.Array, beta: float, *sides_B: jax.Array) -> PairLoss:
        """With rewards of beta times the score of each side."""
        return cls(loss_B, *(jax.lax.stop_gradient(beta * side) for side in sides_B))


def bradley_terry(
    chosen_scores_B: jax.Array,
    rejected_scores_B: jax.Array,
    margin: jax.Array | None,
    centering: float = 0.0,
) -> jax.Array:
    """Reward-model loss, [B]: -log sigmoid(c - r - margin) + centering (c + r)^2.

    margin: Llama 2 (arXiv:2307.09288); centering: arXiv:2312.09244.
    """
    difference = chosen_scores_B - rejected_scores_B
    if margin is not None:
        difference = difference - margin
    loss = -log_sigmoid(difference)
    return loss + centering * (chosen_scores_B + rejected_scores_B) ** 2 if centering else loss


def mean_rows(x_B: jax.Array, n_rows: Count, valid_B: jax.Array | None = None) -> jax.Array:
    """This (micro-)batch's share of the mean over `n_rows` rows of the whole step, a scalar."""
    kept = x_B if valid_B is None else masked(x_B, valid_B)
    return kept.sum() / jnp.maximum(jnp.asarray(n_rows, x_B.dtype), 1)


def sequence_logps(logps_BT: jax.Array, mask_BT: jax.Array, *, average: bool = False) -> jax.Array:
    """Sum (or mean) of a row's valid log-probabilities, [B]."""
    return (row_mean if average else row_sum)(logps_BT, mask_BT)[:, 0]


def _smoothed(logits: jax.Array, label_smoothing: float) -> jax.Array:
    """-(1 - s) log sigmoid(x) - s log sigmoid(-x): s is the chance that a preference label is wrong (cDPO)."""
    return -(1 - label_smoothing) * log_sigmoid(logits) - label_smoothing * log_sigmoid(-logits)


def _score(log_ratio_B: jax.Array, divergence: Divergence) -> jax.Array:
    """f-DPO (arXiv:2309.16240): the score that stands for log pi/ref under another divergence."""
    match divergence:
        case "reverse-kl":
            return log_ratio_B
        case "forward-kl":
            return -jnp.exp(-log_ratio_B)
        case "js":
            return log_sigmoid(log_ratio_B)
        case _:
            raise ValueError(f"unknown divergence {divergence!r}")


def dpo(
    chosen_B: jax.Array,
    rejected_B: jax.Array,
    ref_chosen_B: jax.Array | None = None,
    ref_rejected_B: jax.Array | None = None,
    *,
    beta: float,
    loss: DPOLoss = "sigmoid",
    label_smoothing: float = 0.0,
    divergence: Divergence = "reverse-kl",
    chosen_lengths_B: jax.Array | None = None,
    rejected_lengths_B: jax.Array | None = None,
    discopop_tau: float = 0.05,
) -> PairLoss:
    """The DPO family on summed log-probabilities; x, y the scores log pi/ref of chosen and rejected.

    Without reference log-probabilities the loss is reference-free (they count as 0). With lengths, x and y are
    divided by them. z = beta (x - y), s = label_smoothing:

    | loss | value |
    | --- | --- |
    | sigmoid | -(1-s) log sigmoid(z) - s log sigmoid(-z); DPO arXiv:2305.18290, cDPO |
    | hinge | max(0, 1 - z); SLiC arXiv:2305.10425 |
    | ipo | (x - y - 1/(2 beta))^2; arXiv:2310.12036; its settings average x and y over tokens |
    | robust | (-(1-s) log sigmoid(z) + s log sigmoid(-z)) / (1 - 2s); arXiv:2403.00409 |
    | exo-pair | KL(sigmoid(z) against the label distribution (1-s, s)); arXiv:2402.00856 |
    | nca-pair | -log sigmoid(bx) - (log sigmoid(-bx) + log sigmoid(-by))/2; arXiv:2402.05369 |
    | sppo-hard | (x - 1/(2 beta))^2 + (y + 1/(2 beta))^2; arXiv:2405.00675 |
    | apo-zero | 1 - sigmoid(bx) + sigmoid(by); arXiv:2408.06266 |
    | apo-down | sigmoid(bx) + 1 - sigmoid(z) |
    | discopop | log-ratio modulated: (1-g)(-log sigmoid(z)) + g exp(-z), g = sigmoid(z/tau); arXiv:2406.08414 |

    bx = beta x and by = beta y. The returned rewards are beta log pi/ref, whatever the divergence and the lengths.
    Raises ValueError for an unknown loss or divergence, or for exo-pair without label smoothing.
    """
    ref_chosen = jnp.zeros_like(chosen_B) if ref_chosen_B is None else ref_chosen_B
    ref_rejected = jnp.zeros_like(rejected_B) if ref_rejected_B is None else ref_rejected_B
    x_full, y_full = chosen_B - ref_chosen, rejected_B - ref_rejected
    x, y = _score(x_full, divergence), _score(y_full, divergence)
    if chosen_lengths_B is not None and rejected_lengths_B is not None:
        x, y = x / jnp.maximum(chosen_lengths_B, 1), y / jnp.maximum(rejected_lengths_B, 1)
    z = beta * (x - y)
    match loss:
        case "sigmoid":
            value = _smoothed(z, label_smoothing)
        case "hinge":
            value = jax.nn.relu(1 - z)
        case "ipo":
            value = (x - y - 1 / (2 * beta)) ** 2
        case "robust":
            corrected = (1 - label_smoothing) * log_sigmoid(z) - label_smoothing * log_sigmoid(-z)
            value = -corrected / (1 - 2 * label_smoothing)
        case "exo-pair":
            # A hard label has a probability of 0, whose logarithm is -inf.
            if not 0 < label_smoothing < 1:
                raise ValueError("exo-pair needs a label_smoothing between 0 and 1")
            log_label_c, log_label_r = jnp.log1p(-label_smoothing), jnp.log(label_smoothing)
            value = sigmoid(z) * (log_sigmoid(z) - log_label_c) + sigmoid(-z) * (log_sigmoid(-z) - log_label_r)
        case "nca-pair":
            value = -log_sigmoid(beta * x) - 0.5 * log_sigmoid(-beta * x) - 0.5 * log_sigmoid(-beta * y)
        case "sppo-hard":
            value = (x - 0.5 / beta) ** 2 + (y + 0.5 / beta) ** 2
        case "apo-zero":
            value = 1 - sigmoid(beta * x) + sigmoid(beta * y)
        case "apo-down":
            value = sigmoid(beta * x) + 1 - sigmoid(z)
        case "discopop":
            gate = sigmoid(z / discopop_tau)
            value = -log_sigmoid(z) * (1 - gate) + jnp.exp(-z) * gate
        case _:
            raise ValueError(f"unknown DPO loss {loss!r}")
    return PairLoss.of(value, beta, x_full, y_full)


def ld_weights(mask_BT: jax.Array, other_mask_BT: jax.Array, alpha: float) -> jax.Array:
    """LD-DPO (arXiv:2409.06411): token weights, alpha past the shorter side's length, 1 before it, 0 where masked.

    The sum of `logps * weights` takes the place of the plain sum.
    """
    valid = mask_BT > 0
    other_length = (other_mask_BT > 0).sum(-1, keepdims=True)
    # cumsum numbers the valid tokens from 1, so that masked tokens inside a row do not count as length.
    return jnp.where(jnp.cumsum(valid, -1) > other_length, alpha, 1.0) * valid


def log_odds_ratio(chosen_B: jax.Array, rejected_B: jax.Array, *, logp_max: float | None = None) -> jax.Array:
    """log of odds(chosen) / odds(rejected), odds(p) = p / (1 - p), [B]. logp_max keeps p < 1 (finite odds)."""
    if logp_max is not None:
        chosen_B, rejected_B = jnp.minimum(chosen_B, logp_max), jnp.minimum(rejected_B, logp_max)
    # log(1 - p) from log p; expm1 keeps the digits that 1 - exp loses for small p.
    return (chosen_B - rejected_B) - (jnp.log(-jnp.expm1(chosen_B)) - jnp.log(-jnp.expm1(rejected_B)))


def orpo(
    chosen_avg_B: jax.Array,
    rejected_avg_B: jax.Array,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    logp_max: float | None = None,
) -> PairLoss:
    """The odds-ratio term of ORPO (arXiv:2403.07691): -beta log sigmoid(log odds ratio), on averaged log-probabilities.

    ORPO adds the negative log-likelihood of the chosen side (`rlhf.tuning.losses.sft.nll`).
    """
    loss = beta * _smoothed(log_odds_ratio(chosen_avg_B, rejected_avg_B, logp_max=logp_max), label_smoothing)
    return PairLoss.of(loss, beta, chosen_avg_B, rejected_avg_B)


def cpo(
    chosen_B: jax.Array,
    rejected_B: jax.Array,
    *,
    beta: float,
    loss: Literal["sigmoid", "simpo"] = "simpo",
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """Reference-free losses: CPO (arXiv:2401.08417) and SimPO (arXiv:2405.14734).

    With z = beta (chosen - rejected): "sigmoid" is -log sigmoid(z) of summed log-probabilities, "simpo"
    -log sigmoid(z - gamma) of averaged ones. CPO adds the negative log-likelihood of the chosen side
    (`rlhf.tuning.losses.sft.nll`).
    """
    z = beta * (chosen_B - rejected_B)
    value = _smoothed(z - gamma if loss == "simpo" else z, label_smoothing)
    return PairLoss.of(value, beta, chosen_B, rejected_B)


def kto_reference_point(kl_logps_B: np.ndarray, ref_kl_logps_B: np.ndarray) -> float:
    """KTO's reference point max(0, mean(log pi/ref)) over the step's mismatched completions, on the host.

    A mismatched completion answers another prompt; both arrays hold its summed log-probability, [B]. The point is one
    number for the whole step: a mean over each micro-batch would depend on how the step is split.
    """
    return max(0.0, float((kl_logps_B - ref_kl_logps_B).mean()))


def kto(
    logps_B: jax.Array,
    ref_logps_B: jax.Array,
    desirable_B: jax.Array,
    kl: jax.Array | float,
    *,
    beta: float,
    loss: Literal["kto", "apo-zero-unpaired"],
    desirable_weight: float,
    undesirable_weight: float,
) -> tuple[jax.Array, jax.Array]:
    """KTO (arXiv:2402.01306) on unpaired samples: losses and implicit rewards, both [B].

    With h = log pi/ref the loss of a desirable sample is 1 - sigmoid(beta (h - kl)), that of an undesirable one
    1 - sigmoid(beta (kl - h)), each times its weight.
    "apo-zero-unpaired" takes kl as 0 (arXiv:2408.06266).
    """
    h = logps_B - ref_logps_B
    signed = beta * (h - (kl if loss == "kto" else 0.0))
    value = jnp.where(
        desirable_B > 0, desirable_weight * (1 - sigmoid(signed)), undesirable_weight * (1 - sigmoid(-signed))
    )
    return value, jax.lax.stop_gradient(beta * h)

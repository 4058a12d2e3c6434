"""Ops of the family preference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.losses import preference, sft
from rlhf.tuning.losses.aggregate import aggregate, count
from rlhf.tuning.losses.preference import mean_rows, sequence_logps

from .harness import Case, op
from .ops_tokens import token_logps


def token_mean_nll(logps: jax.Array, mask: jax.Array) -> jax.Array:
    return aggregate(sft.nll(logps), mask, "token-mean", **count(np.asarray(mask))._asdict())


def reward_metrics(pairs: preference.PairLoss) -> dict[str, jax.Array]:
    chosen, rejected = pairs.chosen_rewards_B, pairs.rejected_rewards_B
    accuracy, margin = (chosen > rejected).mean(), (chosen - rejected).mean()
    return {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/accuracies": accuracy,
        "rewards/accuracy": accuracy,
        "rewards/margins": margin,
        "rewards/margin": margin,
    }


def grads_of(total: Any, *arguments: jax.Array, jit: bool = False) -> tuple[Any, Any, tuple[jax.Array, ...]]:
    function = jax.value_and_grad(total, tuple(range(len(arguments))), has_aux=True)
    (loss, aux), grads = (jax.jit(function) if jit else function)(*arguments)
    return loss, aux, grads


@op("preference", "dpo")
def dpo(case: Case) -> dict[str, Any]:
    masks = case["chosen_mask"], case["rejected_mask"]
    kind, alpha = case.param("loss_type"), case.param("ld_alpha")
    sft_weight = case.param("sft_weight", 0.0)
    case.known("wpo_weighting", False)
    reference_free = case.param("reference_free")
    normalised = case.known("length_normalised", True, False)
    options: dict[str, Any] = {
        "beta": case.param("beta"),
        "label_smoothing": case.param("label_smoothing", 0.0),
        "discopop_tau": case.param("discopop_tau", 0.05),
        "divergence": {None: "reverse-kl", "forward_kl": "forward-kl", "js_divergence": "js"}[
            case.param("f_divergence")
        ],
    }
    # "sigmoid_norm" is the sigmoid loss with normalised lengths, "sft" the likelihood of the chosen side alone.
    options["loss"] = {"sigmoid_norm": "sigmoid", "sft": "sigmoid"}.get(kind, kind.replace("_", "-"))
    if normalised:
        options |= {"chosen_lengths_B": masks[0].sum(-1), "rejected_lengths_B": masks[1].sum(-1)}

    def total(chosen: jax.Array, rejected: jax.Array) -> tuple[jax.Array, preference.PairLoss]:
        sums = []
        for logps, mask, other in ((chosen, *masks), (rejected, *masks[::-1])):
            if alpha is not None:
                logps = logps * preference.ld_weights(mask, other, alpha)
            sums.append(sequence_logps(logps, mask))
        if not reference_free:
            sums += [case["ref_chosen_logps_sum"], case["ref_rejected_logps_sum"]]
        pairs = preference.dpo(*sums, **options)
        loss = mean_rows(pairs.loss_B, len(pairs.loss_B))
        if kind == "sft":
            return token_mean_nll(chosen, masks[0]), pairs
        return (loss + sft_weight * token_mean_nll(chosen, masks[0]) if sft_weight else loss), pairs

    loss, pairs, grads = grads_of(total, case["chosen_logps"], case["rejected_logps"])
    return {
        "loss": loss,
        "grad_chosen_logps": grads[0],
        "grad_rejected_logps": grads[1],
        "chosen_rewards": pairs.chosen_rewards_B,
        "rejected_rewards": pairs.rejected_rewards_B,
        "metrics": reward_metrics(pairs),
    }


@op("preference", "orpo")
def orpo(case: Case) -> dict[str, Any]:
    case.known("sft_term", "-chosen logp (averaged iff average_logps) over the completion")
    average, lam = case.param("average_logps"), case.param("lam")

    def total(chosen: jax.Array, rejected: jax.Array) -> tuple[jax.Array, Any]:
        c = sequence_logps(chosen, case["chosen_mask"], average=average)
        r = sequence_logps(rejected, case["rejected_mask"], average=average)
        pairs = preference.orpo(
            c, r, beta=lam, label_smoothing=case.param("label_smoothing"), logp_max=case.param("logp_max")
        )
        ratio = jnp.exp(preference.log_odds_ratio(c, r, logp_max=case.param("logp_max")))
        means = [mean_rows(x, len(c)) for x in (sft.nll(c), pairs.loss_B, c, r, ratio)]
        return means[0] + means[1], (pairs, means)

    loss, (pairs, (nll, odds, c, r, ratio)), grads = grads_of(total, case["chosen_logps"], case["rejected_logps"])
    metrics = {"sft_loss": nll, "or_loss": odds / lam, "log_probs/chosen": c, "log_probs/rejected": r}
    metrics |= {"odds_ratio": ratio} | reward_metrics(pairs)
    return {"loss": loss, "grad_chosen_logps": grads[0], "grad_rejected_logps": grads[1], "metrics": metrics}


def pair_result(loss: jax.Array, pairs: preference.PairLoss, grads: tuple[jax.Array, ...]) -> dict[str, Any]:
    return {
        "loss": loss,
        "grad_chosen": grads[0],
        "grad_rejected": grads[1],
        "chosen_rewards": pairs.chosen_rewards_B,
        "rejected_rewards": pairs.rejected_rewards_B,
    }


@op("preference", "odds_ratio")
def odds_ratio(case: Case) -> dict[str, Any]:
    def total(chosen: jax.Array, rejected: jax.Array) -> tuple[jax.Array, preference.PairLoss]:
        pairs = preference.orpo(chosen, rejected, beta=case.param("beta"))
        return mean_rows(pairs.loss_B, len(chosen)), pairs

    c, r = case["chosen_avg_logps"], case["rejected_avg_logps"]
    return pair_result(*grads_of(total, c, r)) | {"mean_log_odds": preference.log_odds_ratio(c, r).mean()}


@op("preference", "cpo_simpo")
def cpo_simpo(case: Case) -> dict[str, Any]:
    def total(chosen: jax.Array, rejected: jax.Array) -> tuple[jax.Array, preference.PairLoss]:
        case.known("alpha", 0.0)
        pairs = preference.cpo(
            chosen, rejected, beta=case.param("beta"), loss=case.param("loss_type"),
            gamma=case.param("simpo_gamma", 0.0), label_smoothing=case.param("label_smoothing", 0.0),
        )  # fmt: skip
        return mean_rows(pairs.loss_B, len(chosen)), pairs

    return pair_result(*grads_of(total, case["chosen_logps"], case["rejected_logps"]))


@op("preference", "kto")
def kto(case: Case) -> dict[str, Any]:
    case.known("kl", "max(0, mean(kl_logps - ref_kl_logps)), no gradient")
    mask, labels, kind = case["chosen_mask"], case["labels"], case.param("loss_type").replace("_", "-")
    kl_logps = np.asarray(case["kl_logps_sum"]), np.asarray(case["ref_kl_logps_sum"])
    kl = preference.kto_reference_point(*kl_logps) if kind == "kto" else 0.0

    def total(logps: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses, implicit = preference.kto(
            sequence_logps(logps, mask), case["ref_logps_sum"], labels, kl, beta=case.param("beta"), loss=kind,
            desirable_weight=case.param("desirable_weight"), undesirable_weight=case.param("undesirable_weight"),
        )  # fmt: skip
        return mean_rows(losses, len(labels)), implicit

    loss, implicit, (grad,) = grads_of(total, case["chosen_logps"])
    return {"loss": loss, "grad_logps": grad, "rewards": implicit, "kl": kl}


@op("preference", "reward_model")
def reward_model(case: Case) -> dict[str, Any]:
    def total(chosen: jax.Array, rejected: jax.Array) -> tuple[jax.Array, None]:
        losses = preference.bradley_terry(chosen, rejected, case["margin"], case.param("center_coef") or 0.0)
        return mean_rows(losses, len(chosen)), None

    loss, _, grads = grads_of(total, case["chosen"], case["rejected"])
    return {"loss": loss, "grad_chosen": grads[0], "grad_rejected": grads[1]}


def sides(case: Case) -> list[dict[str, Any]]:
    """Targets and masks of both sides: the completion's tokens, and all real tokens but the first."""
    rows = case["chosen_input_ids"].shape[0]
    out = []
    for side, start in (("chosen", 0), ("rejected", rows)):
        ids, labels = case[f"{side}_input_ids"], case[f"{side}_labels"]
        completion, every = (labels != -100)[:, 1:], case[f"{side}_attention_mask"][:, 1:]
        out.append({"rows": slice(start, start + rows), "ids": ids[:, 1:], "completion": completion, "every": every})
    return out


def side_logps(z: jax.Array, side: dict[str, Any]) -> jax.Array:
    return token_logps(z[side["rows"], : side["ids"].shape[1]], side["ids"])[0]


@op("preference", "orpo_from_logits")
def orpo_from_logits(case: Case) -> dict[str, Any]:
    case.known("nll", "mean over prompt and completion tokens of chosen")
    case.known("labels", "-100 = not in the completion")
    chosen, rejected = sides(case)

    def total(z: jax.Array) -> tuple[jax.Array, Any]:
        logps = [side_logps(z, side) for side in (chosen, rejected)]
        c = sequence_logps(logps[0], chosen["completion"], average=True)
        r = sequence_logps(logps[1], rejected["completion"], average=True)
        pairs = preference.orpo(c, r, beta=case.param("beta"))
        nll = token_mean_nll(logps[0], chosen["every"])
        return nll + mean_rows(pairs.loss_B, len(c)), (pairs, nll, c, r)

    loss, (pairs, nll, c, r), (grad,) = grads_of(total, case["logits"], jit=True)
    odds = preference.log_odds_ratio(c, r)
    metrics = {"nll_loss": nll, "logps/chosen": c.mean(), "logps/rejected": r.mean(), "log_odds_chosen": odds.mean()}
    metrics |= {"log_odds_ratio": jax.nn.log_sigmoid(odds).mean(), "logits/chosen": None, "logits/rejected": None}
    return {"loss": loss, "grad_logits": grad, "metrics": metrics | reward_metrics(pairs)}


@op("preference", "cpo_from_logits")
def cpo_from_logits(case: Case) -> dict[str, Any]:
    case.known("nll", "mean over the chosen completion tokens")
    chosen, rejected = sides(case)
    kind, alpha = case.param("loss_type"), case.param("cpo_alpha")

    def total(z: jax.Array) -> tuple[jax.Array, Any]:
        logps = [side_logps(z, side) for side in (chosen, rejected)]
        average = kind == "simpo"
        c = sequence_logps(logps[0], chosen["completion"], average=average)
        r = sequence_logps(logps[1], rejected["completion"], average=average)
        pairs = preference.cpo(c, r, beta=case.param("beta"), loss=kind, gamma=case.param("simpo_gamma"))
        nll = token_mean_nll(logps[0], chosen["completion"])
        return mean_rows(pairs.loss_B, len(c)) + alpha * nll, (pairs, nll, c, r)

    loss, (pairs, nll, c, r), (grad,) = grads_of(total, case["logits"], jit=True)
    metrics = {"nll_loss": nll if alpha else 0.0, "logps/chosen": c.mean(), "logps/rejected": r.mean()}
    metrics |= {"logits/chosen": None, "logits/rejected": None} | reward_metrics(pairs)
    return {"loss": loss, "grad_logits": grad, "metrics": metrics}

"""Ops of the families logps_entropy, masks, sft and distillation."""

from typing import Any

import jax
import jax.numpy as jnp

from tuning.losses import distillation, logits, sft
from tuning.losses.aggregate import aggregate, count
from tuning.losses.masks import completion_mask, masked, positions_from_mask

from .harness import Case, op
from .ops_policy import MODES


@op("logps_entropy", "logps_entropy")
def logps_entropy(case: Case) -> dict[str, Any]:
    z, ids, temperature = case["logits"], case["token_ids"], case.param("temperature")
    out = {
        "logps": logits.token_logps(z, ids, temperature),
        "entropy": logits.entropy(z, temperature),
        "sum_pi_squared": logits.sum_squared_probs(z, temperature),
    }
    if case.wants("grad_logits_of_sum_cotangent_logps"):
        w = case["cotangent"]
        out["grad_logits_of_sum_cotangent_logps"] = jax.grad(
            lambda z: (w * logits.token_logps(z, ids, temperature)).sum()
        )(z)
        out["grad_logits_of_sum_cotangent_entropy"] = jax.grad(lambda z: (w * logits.entropy(z, temperature)).sum())(z)
    return out


@op("masks", "completion_mask")
def mask_from_ids(case: Case) -> dict[str, Any]:
    return {"mask": completion_mask(case["completion_ids"], case.param("eos_ids"))}


@op("masks", "positions_from_mask")
def positions(case: Case) -> dict[str, Any]:
    return {"positions": positions_from_mask(case["mask"])}


@op("sft", "per_token_nll")
def per_token_nll(case: Case) -> dict[str, Any]:
    return {"nll": sft.nll(logits.token_logps(case["logits"][:, :-1], case["input_ids"][:, 1:]))}


@op("sft", "sft_loss")
@op("sft", "sft_loss_packed")
def sft_loss(case: Case) -> dict[str, Any]:
    packed = case.op == "sft_loss_packed"
    case.known("boundary", "a segment's first token is never a target; segment 0 is padding")
    case.known("smoothing", "(1-eps)*nll + eps*mean over the vocabulary of -logp")
    rows = case["completion_mask"] if packed or case.param("mask") == "completion" else case["attention_mask"]
    mask = sft.target_mask(rows, case["segment_ids"] if packed else None)
    if packed:
        # Positions restart where the segment changes, so they carry nothing that the segment ids do not.
        starts = case["segment_ids"][:, 1:] != case["segment_ids"][:, :-1]
        assert bool((case["positions"][:, 1:] == 0)[starts].all())
    kind, smoothing = case.param("loss_type"), case.param("label_smoothing", 0.0)
    items, mode = case.param("num_items_in_batch"), MODES[case.param("agg", "token_mean")]
    denominator_eps, row_eps = case.param("denominator_eps", 0.0), case.param("row_eps", 0.0)
    n_tokens, n_sequences = count(mask)
    n_tokens = (n_tokens if items is None else items) + denominator_eps
    ids = case["input_ids"][:, 1:]

    def total(z: jax.Array) -> jax.Array:
        logps = logits.token_logps(z[:, :-1], ids)
        match kind:
            case "nll" if smoothing:
                losses = sft.smoothed_nll(logps, logits.mean_logps(z[:, :-1]), smoothing)
            case "nll":
                losses = sft.nll(logps)
            case "dft":
                losses = sft.dft(logps)
            case _:
                raise AssertionError(f"unknown loss type {kind!r}")
        return aggregate(losses, mask, mode, n_tokens=n_tokens, n_sequences=n_sequences, row_eps=row_eps)

    if case.wants("grad_logits"):
        loss, grad = jax.jit(jax.value_and_grad(total))(case["logits"])
        return {"loss": loss, "grad_logits": grad, "num_tokens": mask.sum()}
    return {"loss": total(case["logits"]), "num_tokens": mask.sum()}


JSD_WEIGHTS = "{0}*KL(teacher||m) + (1-{0})*KL(student||m); {1}0 = KL(teacher||student), 1 = KL(student||teacher)"


@op("distillation", "gkd_jsd")
def gkd_jsd(case: Case) -> dict[str, Any]:
    case.known("scale_by_temperature_squared", False)
    case.known("mixture", "beta*teacher + (1-beta)*student")
    case.known("weights", JSD_WEIGHTS.format("beta", "beta "))
    beta, temperature = case.param("beta"), case.param("temperature")
    mask, items = case["mask"], case.param("num_items_in_batch")
    counts = count(mask)
    n_tokens = counts.n_tokens if items is None else items
    mode = MODES[case.param("agg", "token_mean")]

    def total(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = distillation.generalised_jsd(z, case["teacher_logits"], beta, temperature)
        return aggregate(tokens, mask, mode, n_tokens=n_tokens, n_sequences=counts.n_sequences), tokens

    (loss, tokens), grad = jax.value_and_grad(total, has_aux=True)(case["student_logits"])
    return {"loss": loss, "per_token": masked(tokens, mask), "grad_student_logits": grad}


@op("distillation", "divergence")
def divergence(case: Case) -> dict[str, Any]:
    case.known("mixture", "alpha*teacher + (1-alpha)*student")
    case.known("weights", JSD_WEIGHTS.format("alpha", ""))
    out = distillation.generalised_jsd(case["student_logits"], case["teacher_logits"], case.param("alpha"))
    return {"per_token": out}


@op("distillation", "topk_divergence")
def topk_divergence(case: Case) -> dict[str, Any]:
    case.known("support", "student top-k")
    rest = {(True, False): "tail", (False, True): "renormalise"}[case.param("tail"), case.param("renormalise")]
    out = distillation.topk_divergence(
        case["student_logits"], case["teacher_logits"], k=case.param("k"), beta=case.param("alpha"), rest=rest
    )
    return {"per_token": out}


@op("distillation", "forward_kl")
@op("distillation", "reverse_kl")
def plain_kl(case: Case) -> dict[str, Any]:
    function = {"KL(teacher||student)": distillation.forward_kl, "KL(student||teacher)": distillation.reverse_kl}
    return {"per_token": function[case.param("direction")](case["student_logits"], case["teacher_logits"])}


@op("distillation", "topk_forward_kl")
def topk_forward_kl(case: Case) -> dict[str, Any]:
    case.known("support", "teacher top-k")
    case.known("renormalise", False)
    out = distillation.topk_divergence(
        case["student_logits"], case["teacher_logits"], k=case.param("k"), rest="drop", support="teacher",
        log_prob_min=case.param("log_prob_min_clamp"),
    )  # fmt: skip
    return {"per_token": out}


@op("distillation", "logit_distillation")
def logit_distillation(case: Case) -> dict[str, Any]:
    case.known("top_k_support", "teacher top-k, renormalised")
    case.known("scale_by_temperature_squared", True)
    case.known("direction", "KL(teacher||student)")
    case.known("agg", "plain mean over all positions, no mask")
    case.known("task_loss", "(1-alpha) * mean CE")
    everything = jnp.ones(case["labels"].shape)
    counts = count(everything)

    def total(z: jax.Array) -> jax.Array:
        losses = distillation.distillation_with_labels(
            z, case["teacher_logits"], case["labels"], alpha=case.param("alpha"),
            temperature=case.param("temperature"), top_k=case.param("top_k"),
        )  # fmt: skip
        return aggregate(losses, everything, "token-mean", **counts._asdict())

    loss, grad = jax.jit(jax.value_and_grad(total))(case["student_logits"])
    return {"loss": loss, "grad_student_logits": grad}

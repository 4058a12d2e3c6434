"""Ops of the families logps_entropy, sft and distillation."""

from typing import Any

import jax
import jax.numpy as jnp

from rlhf.tuning.losses import distillation_head, head, sft
from rlhf.tuning.losses.aggregate import aggregate, count
from rlhf.tuning.losses.masks import masked

from .harness import Case, op
from .ops_policy import MODES


def token_logps(z: jax.Array, ids: jax.Array, temperature: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies of logits [..., V], both [...].

    The head of training takes hidden states and weights: with the identity as weights its logits are those given.
    Nothing is kept for the backward pass, so that its recomputation is tested.
    """
    vocabulary = z.shape[-1]
    flat = z.reshape(-1, vocabulary)
    logps, entropy = head.token_logps(
        flat, ids.reshape(-1), jnp.eye(vocabulary, dtype=z.dtype), temperature=temperature, kept=0
    )
    return logps.reshape(ids.shape), entropy.reshape(ids.shape)


@op("logps_entropy", "logps_entropy")
def logps_entropy(case: Case) -> dict[str, Any]:
    z, ids, temperature = case["logits"], case["token_ids"], case.param("temperature")
    logps, entropy = token_logps(z, ids, temperature)
    out = {"logps": logps, "entropy": entropy}
    if case.wants("grad_logits_of_sum_cotangent_logps"):
        w = case["cotangent"]
        for number, name in enumerate(("logps", "entropy")):
            out[f"grad_logits_of_sum_cotangent_{name}"] = jax.grad(
                lambda z, number=number: (w * token_logps(z, ids, temperature)[number]).sum()
            )(z)
    return out


@op("sft", "per_token_nll")
def per_token_nll(case: Case) -> dict[str, Any]:
    return {"nll": sft.nll(token_logps(case["logits"][:, :-1], case["input_ids"][:, 1:])[0])}


@op("sft", "sft_loss")
def sft_loss(case: Case) -> dict[str, Any]:
    rows = case["completion_mask"] if case.param("mask") == "completion" else case["attention_mask"]
    mask = rows[:, 1:]
    case.known("loss_type", "nll")
    case.known("label_smoothing", 0.0)
    items, mode = case.param("num_items_in_batch"), MODES[case.param("agg", "token_mean")]
    denominator_eps, row_eps = case.param("denominator_eps", 0.0), case.param("row_eps", 0.0)
    n_tokens, n_sequences = count(mask)
    n_tokens = (n_tokens if items is None else items) + denominator_eps
    ids = case["input_ids"][:, 1:]

    def total(z: jax.Array) -> jax.Array:
        losses = sft.nll(token_logps(z[:, :-1], ids)[0])
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
        tokens = distillation_head.generalised_jsd(z, case["teacher_logits"], beta, temperature)
        return aggregate(tokens, mask, mode, n_tokens=n_tokens, n_sequences=counts.n_sequences), tokens

    (loss, tokens), grad = jax.value_and_grad(total, has_aux=True)(case["student_logits"])
    return {"loss": loss, "per_token": masked(tokens, mask), "grad_student_logits": grad}


@op("distillation", "divergence")
def divergence(case: Case) -> dict[str, Any]:
    case.known("mixture", "alpha*teacher + (1-alpha)*student")
    case.known("weights", JSD_WEIGHTS.format("alpha", ""))
    out = distillation_head.generalised_jsd(case["student_logits"], case["teacher_logits"], case.param("alpha"))
    return {"per_token": out}


@op("distillation", "forward_kl")
@op("distillation", "reverse_kl")
def plain_kl(case: Case) -> dict[str, Any]:
    beta = {"KL(teacher||student)": 0.0, "KL(student||teacher)": 1.0}[case.param("direction")]
    return {"per_token": distillation_head.generalised_jsd(case["student_logits"], case["teacher_logits"], beta)}

"""Distillation from a teacher's logits: per-token divergences, [B, T], to be aggregated with a mask.

Axes: B rows, T tokens, V vocabulary, K kept tokens. The temperature divides both sides' logits; `temperature**2`
times the loss keeps the gradient's scale (Hinton et al., arXiv:1503.02531) and is left to the caller.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.nn import log_softmax

from tuning.losses.logits import token_logps


def kl_divergence(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """KL(p || q) over the last axis from log-probabilities; terms of p = 0 count 0."""
    p = jnp.exp(log_p)
    finite = p > 0
    return jnp.where(finite, p * (jnp.where(finite, log_p, 0) - jnp.where(finite, log_q, 0)), 0).sum(-1)


def forward_kl(student_logits: jax.Array, teacher_logits: jax.Array, temperature: float = 1.0) -> jax.Array:
    """KL(teacher || student), [...]; covers the teacher's modes."""
    return kl_divergence(log_softmax(teacher_logits / temperature), log_softmax(student_logits / temperature))


def reverse_kl(student_logits: jax.Array, teacher_logits: jax.Array, temperature: float = 1.0) -> jax.Array:
    """KL(student || teacher), [...]; seeks a mode (MiniLLM, arXiv:2306.08543)."""
    return kl_divergence(log_softmax(student_logits / temperature), log_softmax(teacher_logits / temperature))


def _jsd(student_logps: jax.Array, teacher_logps: jax.Array, beta: float) -> jax.Array:
    if beta == 0:
        return kl_divergence(teacher_logps, student_logps)
    if beta == 1:
        return kl_divergence(student_logps, teacher_logps)
    mixture = jnp.logaddexp(teacher_logps + jnp.log(beta), student_logps + jnp.log1p(-beta))
    return beta * kl_divergence(teacher_logps, mixture) + (1 - beta) * kl_divergence(student_logps, mixture)


def generalised_jsd(
    student_logits: jax.Array, teacher_logits: jax.Array, beta: float = 0.5, temperature: float = 1.0
) -> jax.Array:
    """Generalised Jensen-Shannon divergence of GKD (arXiv:2306.13649), [...].

    beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student; beta 0 is
    KL(teacher || student) and beta 1 KL(student || teacher), the limits after division by beta and 1 - beta.
    """
    return _jsd(log_softmax(student_logits / temperature), log_softmax(teacher_logits / temperature), beta)


def topk_divergence(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    *,
    k: int,
    beta: float = 0.0,
    temperature: float = 1.0,
    rest: Literal["renormalise", "tail", "drop"] = "tail",
    support: Literal["student", "teacher"] = "student",
    log_prob_min: float | None = None,
) -> jax.Array:
    """`generalised_jsd` on the k likeliest tokens of one side, [...].

    rest: the mass outside the support is removed by renormalising ("renormalise"), gathered in one more class
    ("tail"), or left out ("drop"; the result can be negative). log_prob_min is a floor of both sides'
    log-probabilities in the logarithms of "drop".
    """
    student, teacher = log_softmax(student_logits / temperature), log_softmax(teacher_logits / temperature)
    _, kept = jax.lax.top_k(student if support == "student" else teacher, k)
    student, teacher = (jnp.take_along_axis(x, kept, axis=-1) for x in (student, teacher))
    match rest:
        case "renormalise":
            student, teacher = log_softmax(student), log_softmax(teacher)
        case "tail":
            student, teacher = _with_tail(student), _with_tail(teacher)
        case "drop":
            if log_prob_min is not None:
                student, teacher = jnp.maximum(student, log_prob_min), jnp.maximum(teacher, log_prob_min)
        case _:
            raise ValueError(f"unknown treatment of the rest {rest!r}")
    return _jsd(student, teacher, beta)


def _with_tail(logps: jax.Array) -> jax.Array:
    """Append the log of the missing mass, kept above rounding."""
    log_total = jnp.minimum(jax.nn.logsumexp(logps, axis=-1, keepdims=True), -1e-7)
    return jnp.concatenate([logps, jnp.log(-jnp.expm1(log_total))], axis=-1)


def distillation_with_labels(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    labels: jax.Array,
    *,
    alpha: float,
    temperature: float,
    top_k: int = 0,
) -> jax.Array:
    """Hinton's mixture (arXiv:1503.02531), [...]: alpha T^2 KL(teacher || student) + (1 - alpha) cross-entropy.

    With top_k both sides are renormalised on the teacher's likeliest tokens.
    """
    if top_k:
        kl = topk_divergence(
            student_logits, teacher_logits, k=top_k, temperature=temperature, rest="renormalise", support="teacher"
        )
    else:
        kl = forward_kl(student_logits, teacher_logits, temperature)
    return alpha * temperature**2 * kl - (1 - alpha) * token_logps(student_logits, labels)

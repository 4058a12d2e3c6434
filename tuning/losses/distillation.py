"""Distillation from a teacher's logits: per-token divergences, [B, T], to be aggregated with a mask.

Axes: B rows, T tokens, V vocabulary. The temperature divides both sides' logits; `temperature**2`
times the loss keeps the gradient's scale (Hinton et al., arXiv:1503.02531) and is left to the caller.
"""

import jax
import jax.numpy as jnp

from rlhf.tuning.models.sharding import HeadCut


def kl_divergence(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """KL(p || q) over the last axis from log-probabilities; terms with p = 0 count as 0."""
    # Both logarithms are replaced where p is 0: 0 * -inf is NaN, in the gradient even after a `where`.
    p = jnp.exp(log_p)
    finite = p > 0
    return jnp.where(finite, p * (jnp.where(finite, log_p, 0) - jnp.where(finite, log_q, 0)), 0).sum(-1)


def generalised_jsd(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    beta: float = 0.5,
    temperature: float = 1.0,
    cut: HeadCut | None = None,
) -> jax.Array:
    """Generalised Jensen-Shannon divergence of GKD (arXiv:2306.13649), [...], in nats.

    beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student. Logits are [..., V].
    beta 0 is KL(teacher || student) and beta 1 is KL(student || teacher): the limits of the formula divided by beta
    and by 1 - beta. cut: the logits are those of this device's part of the vocabulary, inside `shard_map`.
    """
    student, teacher = (_log_softmax(x / temperature, cut) for x in (student_logits, teacher_logits))
    # At both ends the formula is 0 and log(0) enters it, so the limits are taken.
    if beta in (0, 1):
        divergence = kl_divergence(*((teacher, student) if beta == 0 else (student, teacher)))
    else:
        # log(beta p_teacher + (1 - beta) p_student), without leaving log space.
        mixture = jnp.logaddexp(teacher + jnp.log(beta), student + jnp.log1p(-beta))
        divergence = beta * kl_divergence(teacher, mixture) + (1 - beta) * kl_divergence(student, mixture)
    # A part of the sum, where the axis is a part of the vocabulary.
    return divergence if cut is None else cut.summed(divergence)


def _log_softmax(logits: jax.Array, cut: HeadCut | None) -> jax.Array:
    if cut is None:
        return jax.nn.log_softmax(logits)
    top = cut.greatest(jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    return logits - top - jnp.log(cut.summed(jnp.exp(logits - top).sum(-1, keepdims=True)))

"""Divergences between two LM heads in chunks: [positions, vocabulary] is never held, forward or backward.

On a mesh each device has its own positions and its own part of both vocabularies, as in `head`.

Axes: M positions, D and E hidden sizes of student and teacher, V vocabulary.

`generalised_jsd` has the divergences of whole logits: per token, [B, T], to be aggregated with a mask. The temperature
divides both sides' logits; `temperature**2` times the loss keeps the gradient's scale (Hinton et al., arXiv:1503.02531)
and is left to the caller.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlhf.tuning.models.matmul import factor, soft_cap
from rlhf.tuning.models.sharding import HeadCut
from rlhf.tuning.precision import of_gradients


def kl_divergence(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """KL(p || q) over the last axis from log-probabilities; terms with p = 0 count as 0."""
    # Both logarithms are replaced where p is 0: 0 * -inf is NaN, in the gradient even after a `where`.
    p = jnp.exp(log_p)
    finite = p > 0
    return jnp.where(finite, p * (jnp.where(finite, log_p, 0) - jnp.where(finite, log_q, 0)), 0).sum(-1)


def generalised_jsd(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    beta: float,
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


CHUNK = 128
"""Positions whose logits are held at a time."""


def token_divergences(
    student_MD: jax.Array,
    student_head_VD: jax.Array,
    teacher_ME: jax.Array,
    teacher_head_VE: jax.Array,
    *,
    beta: float,
    temperature: float = 1.0,
    softcaps: tuple[float | None, float | None] = (None, None),
    chunk: int = CHUNK,
) -> jax.Array:
    """`generalised_jsd` between the next-token distributions of student and teacher, [M] in float32.

    beta 0 is KL(teacher || student), 1 is KL(student || teacher). No gradient reaches the teacher. Logits accumulate in
    float32; positions are taken `chunk` at a time and recomputed in the backward pass, so memory is chunk * V for any
    M. softcaps: the cap of student and of teacher, where a head limits logits to cap * tanh(logits / cap). Heads may be
    padded to different vocabularies; only the tokens of the smaller one are compared.
    """
    vocabulary = min(student_head_VD.shape[0], teacher_head_VE.shape[0])
    heads = student_head_VD[:vocabulary], jax.lax.stop_gradient(teacher_head_VE[:vocabulary])
    cut, of_teacher = (HeadCut.of(student_MD.shape[0], *head.shape) for head in heads)

    def local(student_MD: jax.Array, head: jax.Array, teacher_ME: jax.Array, teacher_head: jax.Array) -> jax.Array:
        """The divergences [M] of a device's positions, from its parts of the heads."""
        # Cast once, not in each chunk; the gradient goes to the head as it is stored, which sums the chunks' parts.
        cast = _whole(jax.lax.stop_gradient(head).astype(student_MD.dtype), cut)
        teacher_head = _whole(teacher_head.astype(teacher_ME.dtype), of_teacher)
        size = min(chunk, student_MD.shape[0])

        def chunks(x: jax.Array) -> jax.Array:
            # Zeros fill the last chunk; their divergences are cut off at the end and get no gradient.
            return jnp.pad(x, ((0, -x.shape[0] % size), (0, 0))).reshape(-1, size, x.shape[1])

        # Without the checkpoint the backward pass would keep the logits of every chunk.
        @jax.checkpoint
        def one(args: tuple[jax.Array, jax.Array]) -> jax.Array:
            student, teacher = _logits(args[0], head, cast, cut), _product("md,vd->mv", args[1], teacher_head)
            student, teacher = map(soft_cap, (student, teacher), softcaps)
            return generalised_jsd(student, teacher, beta, temperature, cut)

        # A sequential map, not vmap: one chunk's logits of both models exist at a time.
        divergences = jax.lax.map(one, (chunks(student_MD), chunks(teacher_ME)))
        return divergences.reshape(-1)[: student_MD.shape[0]]

    if cut is not None and of_teacher is not None:
        of = cut.of_positions
        specs = of, cut.of_head, of, of_teacher.of_head
        local = jax.shard_map(local, in_specs=specs, out_specs=of, check_vma=False)
    return local(student_MD, heads[0], jax.lax.stop_gradient(teacher_ME), heads[1])


def _whole(head: jax.Array, cut: HeadCut | None) -> jax.Array:
    return head if cut is None else cut.whole(head)


def _product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The einsum of two arrays, in at least float32."""
    return jnp.einsum(axes, factor(a), factor(b), preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _logits(hidden_MD: jax.Array, head_VD: jax.Array, cast_VD: jax.Array, cut: HeadCut | None) -> jax.Array:
    """hidden @ head.T, [M, V], by `cast`, the head in the type of `hidden` and in its whole width.

    The gradient of the head has the head's own type (R13): chunks add up in the type of the accumulator.
    """
    return _product("md,vd->mv", hidden_MD, cast_VD)


def _forward(
    hidden_MD: jax.Array, head_VD: jax.Array, cast_VD: jax.Array, cut: HeadCut | None
) -> tuple[jax.Array, Any]:
    # An array of no elements carries the type of the head to the backward pass.
    return _logits(hidden_MD, head_VD, cast_VD, cut), (hidden_MD, cast_VD, head_VD[:0])


@of_gradients()
def _backward(cut: HeadCut | None, saved: Any, g_MV: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    hidden, cast, like = saved
    g = g_MV.astype(hidden.dtype)
    of_hidden, of_head = _product("mv,vd->md", g, cast), _product("mv,md->vd", g, hidden)
    # Sums over the other axes of positions, and of hidden states over `tensor`, are the transpose of `shard_map`.
    of_head = of_head if cut is None else cut.own(of_head)
    return of_hidden.astype(hidden.dtype), of_head.astype(like.dtype), None


_logits.defvjp(_forward, _backward)

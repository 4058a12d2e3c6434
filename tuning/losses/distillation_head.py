"""Divergences between two LM heads in chunks: [positions, vocabulary] is never held, forward or backward.

Axes: M positions, D and E hidden sizes of student and teacher, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tuning.losses.distillation import generalised_jsd

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
    student_head = student_head_VD[:vocabulary].astype(student_MD.dtype)
    teacher_head = jax.lax.stop_gradient(teacher_head_VE[:vocabulary]).astype(teacher_ME.dtype)
    size = min(chunk, student_MD.shape[0])

    def chunks(x: jax.Array) -> jax.Array:
        # Zeros fill the last chunk; their divergences are cut off at the end and get no gradient.
        return jnp.pad(x, ((0, -x.shape[0] % size), (0, 0))).reshape(-1, size, x.shape[1])

    # Without the checkpoint the backward pass would keep the logits of every chunk.
    @jax.checkpoint
    def one(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        student, teacher = (
            _capped(
                jnp.einsum(
                    "md,vd->mv", hidden, head, preferred_element_type=jnp.promote_types(hidden.dtype, jnp.float32)
                ),
                cap,
            )
            for hidden, head, cap in zip(args, (student_head, teacher_head), softcaps, strict=True)
        )
        return generalised_jsd(student, teacher, beta, temperature)

    # A sequential map, not vmap: one chunk's logits of both models exist at a time.
    divergences = jax.lax.map(one, (chunks(student_MD), chunks(jax.lax.stop_gradient(teacher_ME))))
    return divergences.reshape(-1)[: student_MD.shape[0]]


def _capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)

"""Divergences in chunks are those of whole logits, in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.losses.distillation_head import generalised_jsd, token_divergences

pytestmark = pytest.mark.slow

M, D, E, V = 21, 6, 10, 33


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


STUDENT, STUDENT_HEAD = normal(0, M, D), normal(1, V, D)
TEACHER, TEACHER_HEAD = normal(2, M, E), normal(3, V, E)
WEIGHTS = normal(4, M)


def whole(student, head, teacher, teacher_head, beta, temperature):
    return generalised_jsd(student @ head.T, teacher @ teacher_head.T, beta, temperature)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("beta", "chunk"), [(0.0, 4), (0.3, 7), (1.0, 64)])
def test_chunks_change_nothing(beta, chunk):
    @jax.jit
    def chunked(student, head):
        return token_divergences(student, head, TEACHER, TEACHER_HEAD, beta=beta, temperature=1.7, chunk=chunk)

    expected = whole(STUDENT, STUDENT_HEAD, TEACHER, TEACHER_HEAD, beta, 1.7)
    np.testing.assert_allclose(chunked(STUDENT, STUDENT_HEAD), expected, rtol=1e-10, atol=1e-12)
    assert float(expected.min()) > 0
    found = jax.grad(lambda *a: (WEIGHTS * chunked(*a)).sum(), (0, 1))(STUDENT, STUDENT_HEAD)
    wanted = jax.grad(lambda s, h: (WEIGHTS * whole(s, h, TEACHER, TEACHER_HEAD, beta, 1.7)).sum(), (0, 1))(
        STUDENT, STUDENT_HEAD
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def test_no_gradient_reaches_the_teacher():
    def total(teacher, head):
        return token_divergences(STUDENT, STUDENT_HEAD, teacher, head, beta=0.5).sum()

    assert all(not np.asarray(g).any() for g in jax.grad(total, (0, 1))(TEACHER, TEACHER_HEAD))


@pytest.mark.usefixtures("float64")
def test_padding_of_the_larger_head_is_left_out():
    padded = jnp.concatenate([TEACHER_HEAD, 9 * normal(5, 7, E)])
    found = token_divergences(STUDENT, STUDENT_HEAD, TEACHER, padded, beta=0.0)
    np.testing.assert_allclose(found, whole(STUDENT, STUDENT_HEAD, TEACHER, TEACHER_HEAD, 0.0, 1.0), rtol=1e-10)


@pytest.mark.usefixtures("float64")
def test_softcaps_limit_the_logits_of_each_side():
    found = token_divergences(
        STUDENT, STUDENT_HEAD, TEACHER, TEACHER_HEAD, beta=0.0, temperature=0.5, softcaps=(2.0, 3.0)
    )
    student, teacher = 2 * jnp.tanh(STUDENT @ STUDENT_HEAD.T / 2), 3 * jnp.tanh(TEACHER @ TEACHER_HEAD.T / 3)
    np.testing.assert_allclose(found, generalised_jsd(student, teacher, 0.0, 0.5), rtol=1e-10)


def test_whole_logits_are_never_held():
    size = 4096

    def total(student, head):
        return token_divergences(student, head, jnp.zeros((size, E)), normal(3, 512, E), beta=0.5, chunk=64).sum()

    program = jax.jit(jax.grad(total, (0, 1))).lower(jnp.zeros((size, D)), normal(1, 512, D)).compile()
    assert program.memory_analysis().temp_size_in_bytes < size * 512 * 4 / 2


def test_gradients_of_the_head_do_not_depend_on_the_chunks_in_bfloat16():
    """Each chunk adds its part of the head's gradient: in bfloat16 the sum would lose what is small beside it."""
    student, teacher = (normal(seed, 2048, 8).astype(jnp.bfloat16) for seed in (5, 6))
    head, other = normal(7, 32, 8), normal(8, 32, 8)

    def gradient(chunk):
        return jax.grad(lambda h: token_divergences(student, h, teacher, other, beta=0.0, chunk=chunk).sum())(head)

    chunked, at_once = gradient(8), gradient(2048)
    assert chunked.dtype == jnp.float32
    np.testing.assert_allclose(chunked, at_once, atol=1e-5 * float(jnp.abs(at_once).max()))

"""The chunked LM head equals the naive one and holds one chunk at a time (R2, R13)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.losses.head import token_logps


def naive(hidden, targets, weight, temperature, softcap=None):
    logits = hidden @ weight.T
    logits = (logits if softcap is None else softcap * jnp.tanh(logits / softcap)) / temperature
    logp = jax.nn.log_softmax(logits)
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return jnp.take_along_axis(logp, targets[:, None], -1)[:, 0], entropy


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kept", [0, 10**6])
@pytest.mark.parametrize("elements", [1, 5 * 128, 10**6])
@pytest.mark.parametrize(
    "temperature, softcap, positions",
    [(0.7, None, 1), (1.3, 2.0, 33), (1.0, 2.0, 7)],
)
def test_values_and_gradients_equal_the_naive_head(temperature, softcap, positions, elements, kept):
    # 300 tokens: the last slice of 128 repeats part of the one before.
    k = jax.random.split(jax.random.key(positions), 3)
    hidden, weight = jax.random.normal(k[0], (positions, 12)), jax.random.normal(k[1], (300, 12))
    targets = jax.random.randint(k[2], (positions,), 0, 300).at[-1].set(299).at[0].set(200)

    def ours(h, w):
        lp, en = token_logps(h, targets, w, temperature=temperature, softcap=softcap, elements=elements, kept=kept)
        return (lp * (1 + jnp.arange(positions))).sum() + 0.3 * en.sum()

    def theirs(h, w):
        lp, en = naive(h, targets, w, temperature, softcap)
        return (lp * (1 + jnp.arange(positions))).sum() + 0.3 * en.sum()

    np.testing.assert_allclose(ours(hidden, weight), theirs(hidden, weight), rtol=1e-10)
    for a, b in zip(jax.grad(ours, (0, 1))(hidden, weight), jax.grad(theirs, (0, 1))(hidden, weight), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


def temporary(function, *shapes, dtype=jnp.float32):
    """Bytes beside the arguments and results of a compiled function of arrays of these shapes."""
    given = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return jax.jit(function).lower(*given).compile().memory_analysis().temp_size_in_bytes


def far_apart():
    """Logits that reach 150, so that most probabilities are 0 in float32; the first target has such a one."""
    k = jax.random.split(jax.random.key(3), 2)
    hidden, weight = 4 * jax.random.normal(k[0], (9, 12)), 4 * jax.random.normal(k[1], (300, 12))
    logits = hidden @ weight.T
    targets = jnp.argmax(logits, -1).at[0].set(jnp.argmin(logits[0]))
    assert jnp.ptp(logits[0]) > 120
    return hidden, weight, targets


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_by_kept_exponentials_are_those_of_logits_that_are_made_again(dtype):
    *wide, targets = far_apart()

    def gradients(kept):
        def f(h, w):
            lp, en = token_logps(h, targets, w, elements=9 * 128, kept=kept)
            return (lp * jnp.arange(1.0, 10.0)).sum() + 0.3 * en.sum()

        found = jax.jit(jax.grad(f, (0, 1)))(*(x.astype(dtype) for x in wide))
        return [np.asarray(x, np.float64) for x in found]

    for kept, again in zip(gradients(2**20), gradients(0), strict=True):
        assert np.isfinite(kept).all()
        # A rounding of bfloat16 is 2^-8 of a number; a gradient sums several.
        np.testing.assert_allclose(
            kept, again, rtol=0, atol=(2**-7 if dtype == "bfloat16" else 1e-5) * np.abs(again).max()
        )


def test_what_is_kept_is_held_once_in_the_type_of_the_products():
    positions, vocabulary = 256, 65536

    def loss(h, w):
        return token_logps(h, jnp.zeros(positions, jnp.int32), w, elements=2**20)[0].sum()

    found = temporary(jax.grad(loss, (0, 1)), (positions, 16), (vocabulary, 16), dtype=jnp.bfloat16)
    # Two bytes each, and a few slices of 4 MiB.
    kept = 2 * positions * vocabulary
    assert kept < found < 1.6 * kept


def test_an_entropy_without_a_gradient_costs_no_product():
    shapes = [jax.ShapeDtypeStruct((n, 16), jnp.float32) for n in (256, 1024)]

    def products(of_loss):
        def loss(h, w):
            found = token_logps(h, jnp.zeros(256, jnp.int32), w)
            return sum(found[i].sum() for i in of_loss), found[1].sum()

        return str(jax.make_jaxpr(jax.grad(loss, (0, 1), has_aux=True))(*shapes)).count("dot_general")

    assert products([0, 1]) == products([0]) + 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_entropy_near_its_maximum_has_the_gradient_of_exact_logits(dtype):
    """Where logits differ by a hundredth, a rounding of their exponentials would be a fifth of it."""
    k = jax.random.split(jax.random.key(1), 2)
    hidden, weight = 0.01 * jax.random.normal(k[0], (8, 64)), 0.125 * jax.random.normal(k[1], (1024, 64))

    def gradient(dtype):
        def f(h, w):
            return token_logps(h, jnp.zeros(8, jnp.int32), w, elements=8 * 256)[1].sum()

        return np.asarray(jax.grad(f, 1)(hidden.astype(dtype), weight.astype(dtype)), np.float64)

    with jax.enable_x64(True):
        exact = gradient("float64")
    assert np.linalg.norm(gradient(dtype) - exact) < 0.01 * np.linalg.norm(exact)


@pytest.mark.slow
def test_second_derivatives_are_right_or_refused():
    k = jax.random.split(jax.random.key(2), 3)
    hidden, weight, along = (
        jax.random.normal(key, shape) for key, shape in zip(k, [(4, 8), (300, 8), (4, 8)], strict=True)
    )

    def bent(dtype, head):
        def f(h):
            return 0.1 * (head(h, jnp.arange(4), weight.astype(dtype))[0] ** 2).sum()

        return jax.grad(lambda h: (jax.grad(f)(h) * along.astype(dtype)).sum())(hidden.astype(dtype))

    def ours(*args):
        return token_logps(*args, elements=512)

    np.testing.assert_allclose(
        bent("float32", ours), bent("float32", lambda h, t, w: naive(h, t, w, 1.0)), rtol=1e-4, atol=1e-5
    )
    with pytest.raises(NotImplementedError, match="kept=0"):
        bent("bfloat16", ours)


def test_logits_that_a_backward_pass_would_keep_are_made_in_slices_where_there_is_none():
    positions, vocabulary = 1024, 8192

    def scored(h, w):
        return token_logps(h, jnp.zeros(positions, jnp.int32), w, elements=2**20)[0]

    assert temporary(scored, (positions, 16), (vocabulary, 16)) < positions * vocabulary * 4 / 2


def test_a_train_step_needs_no_more_memory_for_a_larger_vocabulary():
    # 4,096 packed tokens, all trained.
    hidden, positions = 128, 4096

    def beyond_the_embedding(vocabulary):
        def f(h, w):
            return token_logps(h, jnp.zeros(positions, jnp.int32), w)[0].sum()

        return temporary(jax.value_and_grad(f, (0, 1)), (positions, hidden), (vocabulary, hidden))

    small, large = beyond_the_embedding(32_000), beyond_the_embedding(262_144)
    assert large < 1.3 * small
    assert large < positions * 262_144 * 4 / 8

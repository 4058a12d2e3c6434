"""The chunked LM head equals the naive one and holds one chunk at a time (R2, R13)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tuning.losses.head import token_logps


def naive(hidden, targets, weight, temperature):
    logits = hidden @ weight.T / temperature
    logp = jax.nn.log_softmax(logits)
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return jnp.take_along_axis(logp, targets[:, None], -1)[:, 0], entropy


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("positions", [1, 7, 16, 33])
def test_values_and_gradients_equal_the_naive_head(temperature, positions):
    k = jax.random.split(jax.random.key(positions), 3)
    hidden, weight = jax.random.normal(k[0], (positions, 12)), jax.random.normal(k[1], (50, 12))
    targets = jax.random.randint(k[2], (positions,), 0, 50)

    def ours(h, w):
        lp, en = token_logps(h, targets, w, temperature=temperature, chunk=8)
        return (lp * jnp.arange(positions)).sum() + 0.3 * en.sum()

    def theirs(h, w):
        lp, en = naive(h, targets, w, temperature)
        return (lp * jnp.arange(positions)).sum() + 0.3 * en.sum()

    np.testing.assert_allclose(ours(hidden, weight), theirs(hidden, weight), rtol=1e-5)
    for a, b in zip(jax.grad(ours, (0, 1))(hidden, weight), jax.grad(theirs, (0, 1))(hidden, weight), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_peak_memory_does_not_grow_with_positions_times_vocabulary():
    vocabulary, hidden = 8192, 16

    def peak(positions):
        def f(h, w):
            return token_logps(h, jnp.zeros(positions, jnp.int32), w, chunk=128)[0].sum()

        shapes = (
            jax.ShapeDtypeStruct((positions, hidden), jnp.float32),
            jax.ShapeDtypeStruct((vocabulary, hidden), jnp.float32),
        )
        return jax.jit(jax.grad(f, (0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    full = 4096 * vocabulary * 4
    assert peak(4096) < full / 4
    assert peak(4096) - peak(1024) < (full - 1024 * vocabulary * 4) / 8

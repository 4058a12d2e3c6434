"""KL estimators against the exact KL of a small categorical, by summing over every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.losses.kl import kl_per_token

LOGITS = np.array([0.3, -1.2, 0.8, 0.1, -0.4])
REF = np.array([-0.5, 0.4, 0.2, 0.9, -1.0])


pytestmark = pytest.mark.usefixtures("float64")


def exact(logits: jax.Array) -> jax.Array:
    logp, logq = jax.nn.log_softmax(logits), jax.nn.log_softmax(jnp.asarray(REF))
    return (jnp.exp(logp) * (logp - logq)).sum()


def expected_estimate(logits: jax.Array, **options: str) -> jax.Array:
    """E over tokens sampled from the policy; the sampling itself carries no gradient."""
    logp, logq = jax.nn.log_softmax(logits), jax.nn.log_softmax(jnp.asarray(REF))
    estimate = kl_per_token(logp[:, None], logq[:, None], **options)[:, 0]
    return (jax.lax.stop_gradient(jnp.exp(logp)) * estimate).sum()


def both(**options: str) -> tuple[jax.Array, jax.Array]:
    return jax.value_and_grad(lambda x: expected_estimate(x, **options))(jnp.asarray(LOGITS))


def true() -> tuple[jax.Array, jax.Array]:
    return jax.value_and_grad(exact)(jnp.asarray(LOGITS))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_values_of_k1_and_k3_are_unbiased(kind: str) -> None:
    np.testing.assert_allclose(both(kind=kind)[0], true()[0], rtol=1e-10)


def test_gradient_of_k1_as_a_loss_is_zero() -> None:
    np.testing.assert_allclose(both(kind="k1")[1], 0, atol=1e-12)


def test_gradient_of_k2_is_exact_and_that_of_k3_is_not() -> None:
    np.testing.assert_allclose(both(kind="k2")[1], true()[1], rtol=1e-10)
    assert np.abs(both(kind="k3")[1] - true()[1]).max() > 0.05


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_straight_through_has_both(kind: str) -> None:
    value, grad = both(kind=kind, straight_through="k2")
    np.testing.assert_allclose(value, true()[0], rtol=1e-10)
    np.testing.assert_allclose(grad, true()[1], rtol=1e-10)


def test_weighted_k2_is_exact_off_policy() -> None:
    old = jax.nn.log_softmax(jnp.asarray([0.0, 0.5, -0.5, 0.2, 0.1]))

    def off_policy(logits: jax.Array) -> jax.Array:
        logp, logq = jax.nn.log_softmax(logits), jax.nn.log_softmax(jnp.asarray(REF))
        estimate = kl_per_token(logp, logq, "k3", straight_through="weighted-k2", old_logps_BT=old)
        return (jnp.exp(old) * estimate).sum()

    np.testing.assert_allclose(jax.grad(off_policy)(jnp.asarray(LOGITS)), true()[1], rtol=1e-10)


def test_k1_in_the_reward_gives_the_exact_gradient() -> None:
    def surrogate(logits: jax.Array) -> jax.Array:
        logp, logq = jax.nn.log_softmax(logits), jax.nn.log_softmax(jnp.asarray(REF))
        penalty = jax.lax.stop_gradient(kl_per_token(logp, logq, "k1"))
        return (jax.lax.stop_gradient(jnp.exp(logp)) * penalty * logp).sum()

    np.testing.assert_allclose(jax.grad(surrogate)(jnp.asarray(LOGITS)), true()[1], rtol=1e-10)

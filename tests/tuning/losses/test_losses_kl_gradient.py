"""KL estimators against the exact KL of a small categorical, by summing over every token."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.losses.kl import kl_per_token

LOGITS = np.array([0.3, -1.2, 0.8, 0.1, -0.4])
REF = np.array([-0.5, 0.4, 0.2, 0.9, -1.0])


pytestmark = pytest.mark.usefixtures("float64")


def logps(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.nn.log_softmax(logits), jax.nn.log_softmax(jnp.asarray(REF))


def of_policy(estimate: Callable[[jax.Array, jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Mean over tokens sampled from the policy, and its gradient; the sampling itself carries none."""

    def mean(logits: jax.Array) -> jax.Array:
        logp, logq = logps(logits)
        return (jax.lax.stop_gradient(jnp.exp(logp)) * estimate(logp[:, None], logq[:, None])[:, 0]).sum()

    return jax.value_and_grad(mean)(jnp.asarray(LOGITS))


def both(**options: str) -> tuple[jax.Array, jax.Array]:
    return of_policy(lambda logp, logq: kl_per_token(logp, logq, **options))


def true() -> tuple[jax.Array, jax.Array]:
    def exact(logits: jax.Array) -> jax.Array:
        logp, logq = logps(logits)
        return (jnp.exp(logp) * (logp - logq)).sum()

    return jax.value_and_grad(exact)(jnp.asarray(LOGITS))


def test_gradient_of_k1_as_a_loss_is_zero() -> None:
    np.testing.assert_allclose(both(kind="k1")[1], 0, atol=1e-12)


def test_gradient_of_k2_is_exact_and_that_of_k3_is_not() -> None:
    np.testing.assert_allclose(both(kind="k2")[1], true()[1], rtol=1e-10)
    assert np.abs(both(kind="k3")[1] - true()[1]).max() > 0.05


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_straight_through_has_both(kind: str) -> None:
    np.testing.assert_allclose(both(kind=kind)[0], true()[0], rtol=1e-10)
    for found, wanted in zip(both(kind=kind, straight_through="k2"), true(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10)


def test_weighted_k2_is_exact_off_policy() -> None:
    old = jax.nn.log_softmax(jnp.asarray([0.0, 0.5, -0.5, 0.2, 0.1]))

    def off_policy(logits: jax.Array) -> jax.Array:
        estimate = kl_per_token(*logps(logits), "k3", straight_through="weighted-k2", old_logps_BT=old)
        return (jnp.exp(old) * estimate).sum()

    np.testing.assert_allclose(jax.grad(off_policy)(jnp.asarray(LOGITS)), true()[1], rtol=1e-10)


def test_k1_in_the_reward_gives_the_exact_gradient() -> None:
    found = of_policy(lambda logp, logq: jax.lax.stop_gradient(kl_per_token(logp, logq, "k1")) * logp)
    np.testing.assert_allclose(found[1], true()[1], rtol=1e-10)

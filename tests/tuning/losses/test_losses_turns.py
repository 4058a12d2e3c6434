"""GAE over holes is that of a plain loop, and losses are those without the holes (turns: the oracle)."""

import jax
import numpy as np
import pytest

from rlhf.tuning.losses.aggregate import aggregate, count
from rlhf.tuning.losses.importance import gated_weights, importance_weights
from rlhf.tuning.losses.kl import kl_per_token
from rlhf.tuning.losses.returns import gae, whiten
from tests.tuning.losses.surrogates import LOSSES, MODES

RANDOM = np.random.default_rng(4)
# Sampled tokens, observations between them, padding behind.
MASK = np.array([[c == "x" for c in row] for row in ("xx..xx.xxx", ".xxx......", "xxxxx.....", "..........")])
B, T = MASK.shape
REWARDS, VALUES = RANDOM.normal(size=(B, T)), RANDOM.normal(size=(B, T))
AFTER = np.array([0.0, 0.7, 0.0, 0.3])


pytestmark = pytest.mark.usefixtures("float64")


def compact(x_BT: np.ndarray) -> np.ndarray:
    """The tokens of each row without the holes between them, 0 behind."""
    out = np.zeros_like(x_BT)
    for b, mask_T in enumerate(MASK):
        out[b, : mask_T.sum()] = x_BT[b, mask_T]
    return out


def test_gae_over_holes_is_that_of_a_plain_loop() -> None:
    wanted = np.zeros((B, T))
    for b in range(B):
        following, a = AFTER[b], 0.0
        for t in reversed(np.flatnonzero(MASK[b])):
            a = REWARDS[b, t] + 0.9 * following - VALUES[b, t] + 0.9 * 0.8 * a
            wanted[b, t], following = a, VALUES[b, t]
    found, _ = gae(REWARDS, VALUES, MASK, 0.9, 0.8, bootstrap_B=AFTER)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_holes_change_no_loss_and_no_gradient(name: str, mode: str) -> None:
    rng = np.random.default_rng(5)
    arrays = [-rng.exponential(1.0, (B, T)) for _ in range(3)]
    ref, advantages = -rng.exponential(1.0, (B, T)), rng.normal(size=B)
    dense = compact(MASK)
    constant = 7.0 if mode == "constant" else None

    def total(logps: jax.Array, old: jax.Array, mu: jax.Array, ref: jax.Array, mask: jax.Array) -> jax.Array:
        """Everything that a step adds up but the entropy: surrogate, correction of both kinds, KL."""
        losses = LOSSES[name](logps, old, advantages, mask)[0]
        weights = importance_weights(old, mu, mask, level="sequence", weight_max=2.0)
        weights = weights + gated_weights(old, mu, mask, band=(0.5, 2.0))
        each = losses * weights + kl_per_token(logps, ref, "k3", mask_BT=mask) + whiten(old, mask) * logps
        return aggregate(each, mask, mode, **count(np.asarray(mask))._asdict(), constant=constant)

    spread = [np.where(MASK, x, np.nan) for x in (*arrays, ref)]
    value, slope = jax.value_and_grad(total)(*spread, MASK)
    plain, of_plain = jax.value_and_grad(total)(*map(compact, (*arrays, ref)), dense)
    np.testing.assert_allclose(value, plain, rtol=1e-12)
    np.testing.assert_allclose(compact(np.asarray(slope)), of_plain, rtol=1e-10, atol=1e-13)
    assert not np.asarray(slope)[~MASK].any()

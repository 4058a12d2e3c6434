"""GAE over holes is that of a plain loop (turns: the oracle)."""

import numpy as np
import pytest

from rlhf.tuning.losses.returns import gae

RANDOM = np.random.default_rng(4)
# Sampled tokens, observations between them, padding behind.
MASK = np.array([[c == "x" for c in row] for row in ("xx..xx.xxx", ".xxx......", "xxxxx.....", "..........")])
B, T = MASK.shape
REWARDS, VALUES = RANDOM.normal(size=(B, T)), RANDOM.normal(size=(B, T))
AFTER = np.array([0.0, 0.7, 0.0, 0.3])


pytestmark = pytest.mark.usefixtures("float64")


def test_gae_over_holes_is_that_of_a_plain_loop() -> None:
    wanted = np.zeros((B, T))
    for b in range(B):
        following, a = AFTER[b], 0.0
        for t in reversed(np.flatnonzero(MASK[b])):
            a = REWARDS[b, t] + 0.9 * following - VALUES[b, t] + 0.9 * 0.8 * a
            wanted[b, t], following = a, VALUES[b, t]
    found, _ = gae(REWARDS, VALUES, MASK, 0.9, 0.8, bootstrap_B=AFTER)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)

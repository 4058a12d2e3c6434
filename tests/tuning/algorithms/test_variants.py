"""Algorithms beside GRPO's own: one round of each runs, and trains on something else than GRPO."""

import math

import numpy as np
import pytest

from tests.tuning.algorithms.support import play, settings
from tuning.algorithms.algorithm import Objective, Scored, find

VARIANTS = ["sapo", "gmpo", "dppo", "dppo-kl", "opo", "gpg", "pass-at-k"]


@pytest.fixture(scope="module")
def of_grpo():
    return play(settings(algorithm="grpo"), 1)[1][0]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_round_runs_and_is_not_that_of_grpo(name, of_grpo):
    (found,) = play(settings(algorithm=name), 1)[1]
    watched = ("loss", "grad_norm", "advantage_spread")
    assert all(math.isfinite(found[k]) for k in watched) and found["skipped"] == 0 < found["grad_norm"]
    assert any(abs(found[k] - of_grpo[k]) > 1e-3 * abs(of_grpo[k]) for k in watched), {k: found[k] for k in watched}


def test_baselines_of_opo_and_pass_at_k():
    mask = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0]], np.float32)
    totals = np.array([1.0, 0.25, 0.5], np.float32)
    scored = Scored(totals, np.zeros(3, int), np.ones(3, bool), mask, np.zeros_like(mask))
    # Lengths 3, 1 and 2: the baseline is (3 + 0.25 + 1) / 6.
    np.testing.assert_allclose(
        find(Objective(algorithm="opo")).advantages(scored), totals - 4.25 / 6, rtol=1e-6
    )  # fmt: skip
    lead = 0.5 / (np.std(totals, ddof=1) + 1e-6)
    np.testing.assert_allclose(find(Objective(algorithm="pass-at-k")).advantages(scored), [lead, 0, 0], rtol=1e-5)
    # All three rewards are above 0, so GPG's factor is 1.
    np.testing.assert_allclose(find(Objective(algorithm="gpg")).advantages(scored), totals - totals.mean(), rtol=1e-6)

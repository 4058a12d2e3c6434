"""Algorithms beside GRPO's own: one round of each runs, and trains on something else than GRPO."""

import math

import numpy as np
import pytest

from rlhf.tuning.algorithms.algorithm import Objective, Scored, find
from rlhf.tuning.algorithms.settings import RoundSettings
from tests.tuning.algorithms.support import play, settings

VARIANTS = ["sapo", "gmpo", "dppo", "dppo-kl", "opo", "gpg", "pass-at-k"]


@pytest.fixture(scope="module")
def of_grpo():
    return play(settings(algorithm="grpo"), 1)[1][0]


@pytest.mark.parametrize("name", [n if n == "gmpo" else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS])
def test_a_round_runs_and_is_not_that_of_grpo(name, of_grpo):
    (found,) = play(settings(algorithm=name), 1)[1]
    watched = ("loss", "grad_norm", "advantage_spread")
    assert all(math.isfinite(found[k]) for k in watched) and found["skipped"] == 0 < found["grad_norm"]
    assert any(abs(found[k] - of_grpo[k]) > 1e-3 * abs(of_grpo[k]) for k in watched), {k: found[k] for k in watched}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        # Section 4.1; section 2.3 takes the KL off.
        ("dapo", {"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.0, "aggregation": "token-mean"}),
        # Section 5.1.
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "kl_coef": 0.0, "aggregation": "sequence-mean-token-mean"}),
        ("dr-grpo", {"normalisation": "none", "aggregation": "constant", "kl_coef": 0.0}),
        # Weights up to 5, as in ScaleRL (arXiv:2510.13786), and no lower bound.
        ("cispo", {"clip_low": 1.0, "clip_high": 4.0, "kl_coef": 0.0, "aggregation": "token-mean"}),
        # Appendix C.
        ("rloo", {"kl_in_reward": 0.03, "kl_coef": 0.0, "aggregation": "sequence-mean-token-mean"}),
        # The authors' scripts.
        ("remax", {"kl_in_reward": 0.05, "kl_coef": 0.0}),
        # InstructGPT, appendix C.
        ("ppo", {"kl_in_reward": 0.02, "kl_coef": 0.0, "clip_low": 0.2, "clip_high": 0.2}),
        ("online-dpo", {"beta": 0.1}),
    ],
)
def test_presets_are_the_values_of_the_papers(name, values):
    found = RoundSettings.of(name)
    assert {key: getattr(found, key) for key in values} == values


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

"""A policy is told to be no worse than by a margin no oftener than the level says, however few losses are seen."""

import numpy as np
import pytest
from scipy.special import betaincc

from rlhf.tuning.evaluation.margin import above_margin
from rlhf.tuning.evaluation.permutation import sign_flip


def p_of(gaps, least, level=0.025, **more):
    gaps = np.asarray(gaps, float)[:, None]
    return above_margin(np.zeros_like(gaps), gaps, level, least, **more)


@pytest.mark.parametrize(("losses", "problems", "margin"), [(0, 200, 0.02), (1, 200, 0.03), (5, 300, 0.04)])
def test_with_losses_alone_it_is_the_bound_of_clopper_and_pearson(losses, problems, margin):
    gaps = [-1.0] * losses + [0.0] * (problems - losses)
    assert p_of(gaps, -margin, 0.001) == pytest.approx(betaincc(losses + 1, problems - losses, margin), rel=0.1)


def test_among_many_gains_and_losses_it_is_the_one_of_the_normal_distribution():
    gaps = [1.0] * 800 + [0.0] * 8_400 + [-1.0] * 800
    # 0.02 are 5 standard errors, 0.008 are 2.
    assert p_of(gaps, -0.02) < 0.0002 and p_of(gaps, -0.008) == pytest.approx(0.024, rel=0.2)


def test_problems_of_a_cluster_are_one_and_larger_scales_can_lose_more():
    gaps, names = [0.0] * 100, [i // 10 for i in range(100)]
    # Ten independent problems without a loss.
    assert p_of(gaps, -0.2, clusters=names) == pytest.approx(p_of([0.0] * 10, -0.2), rel=0.05)
    assert p_of([10.0] + [0.0] * 99, -0.2) > 10 * p_of([1.0] + [0.0] * 99, -0.2)
    with pytest.raises(ValueError, match="at least one problem"):
        p_of([np.nan], -0.1)


def test_the_best_of_ten_policies_at_the_margin_passes_no_oftener_than_the_level_says():
    rng, nights, problems, candidates, margin = np.random.default_rng(2), 400, 200, 10, 0.02
    level = 0.025 / candidates
    found = signs = 0
    for _ in range(nights):
        losses = (rng.random((candidates, problems)) < margin).sum(1).min()
        gaps = np.zeros((problems, 1))
        gaps[:losses] = -1
        found += above_margin(np.zeros_like(gaps), gaps, level, -margin) <= level
        # Equal scores alone pass a test of signs.
        signs += sign_flip(np.zeros_like(gaps), gaps, level, -margin).p <= level
    assert found / nights <= 0.025 and signs / nights > 0.5

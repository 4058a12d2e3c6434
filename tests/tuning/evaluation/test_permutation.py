"""The tests by signs and by a margin tell a difference from chance as often as their level says and no oftener."""

import itertools

import numpy as np
import pytest
from scipy.special import betaincc

from rlhf.tuning.evaluation import permutation
from rlhf.tuning.evaluation.permutation import above_margin, sign_flip
from rlhf.tuning.evaluation.statistics import paired_difference


def flipped(gaps, level=0.025, **more):
    gaps = np.asarray(gaps, float)[:, None]
    return sign_flip(np.zeros_like(gaps), gaps, level, **more)


def by_hand(sums):
    """The share of all choices of signs whose sum is at least the one seen."""
    sums = np.asarray(sums)
    signs = np.asarray(list(itertools.product((-1, 1), repeat=len(sums))))
    return float((signs @ np.abs(sums) >= sums.sum() - 1e-9).mean())


def test_p_is_the_share_of_all_choices_of_signs():
    rng = np.random.default_rng(3)
    for gaps in ([1, 1, 1, 1, 1], [1, 1, 1, -1, 0, 0], [0.25, -0.5, 0.75, 1, 0.25, 0.25], rng.normal(0.4, 1, 12)):
        gaps = np.asarray(gaps, float)
        assert flipped(gaps).p == pytest.approx(by_hand(gaps[gaps != 0]))
        assert flipped(gaps, least=0.1).p == pytest.approx(by_hand(gaps - 0.1))
    # A hundred thousand problems of one size are a sign test.
    assert flipped([1] * 50_200 + [-1] * 49_800).p == pytest.approx(0.103, abs=1e-3)
    assert flipped([0, 0]) == permutation.SignFlip(1.0, 0)


def test_problems_of_a_cluster_have_one_sign():
    gaps = [1.0, 1.0, 1.0, 1.0, -1.0, 0.5]
    found = flipped(gaps, clusters=["a", "a", "a", "b", "c", "d"])
    assert found.p == pytest.approx(by_hand([3, 1, -1, 0.5])) and found.clusters == 4
    # Those that cancel within a cluster have no sign.
    assert flipped([1, -1, 1], clusters=["a", "a", "b"]).clusters == 1


def test_few_problems_cannot_have_a_small_p():
    assert flipped([1] * 5 + [0] * 95).p == pytest.approx(2**-5)


def test_drawn_signs_agree_with_all_of_them_and_never_say_none(monkeypatch):
    gaps = np.random.default_rng(5).normal(0.3, 1, 14)
    exact = flipped(gaps).p
    monkeypatch.setattr(permutation, "_EXACT", 1)
    assert flipped(gaps, 0.001).p == pytest.approx(exact, rel=0.1)
    assert flipped(gaps, 0.001) == flipped(gaps, 0.001)
    # The choice that was seen is one of them: p is never 0 (Phipson and Smyth, 2010).
    assert flipped(np.arange(1, 60)).p == 1 / 10_000


def test_the_best_of_many_equal_policies_is_better_no_oftener_than_the_level_says():
    rng, nights, problems, candidates = np.random.default_rng(1), 1200, 100, 40
    level = 0.025 / candidates
    found = bootstrap = 0
    for _ in range(nights):
        champion = (rng.random((problems, 1)) < 0.95).astype(float)
        scores = (rng.random((candidates, problems, 1)) < 0.95).astype(float)
        best = scores[scores.mean((1, 2)).argmax()]
        found += sign_flip(champion, best, level).p <= level
        # What a percentile bootstrap makes of the same nights, of which those that are near are enough.
        if best.sum() - champion.sum() >= 6:
            bootstrap += paired_difference(champion, best, confidence=1 - 2 * level)[1] > 0
    assert found / nights <= 0.025 < bootstrap / nights


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

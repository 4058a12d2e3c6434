"""Intervals cover what they promise, comparisons are paired, and estimators are unbiased."""

import numpy as np
import pytest

from tuning.evaluation.statistics import (
    calibration_error,
    constant_baseline,
    mean_interval,
    paired_difference,
    pass_at_k,
)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        p = rng.beta(2, 2, 100)
        correct = rng.random((100, 4)) < p[:, None]
        _, low, high = mean_interval(correct, seed=trial)
        covered += low <= 0.5 <= high
    assert 180 <= covered <= 200


def test_samples_of_one_problem_do_not_shrink_the_interval_like_problems_do():
    few = np.repeat(np.eye(2)[[0, 1] * 10][:, :1], 100, axis=1)
    _, low, high = mean_interval(few)
    assert high - low > 0.3


def test_unanimous_problems_still_have_a_width():
    mean, low, high = mean_interval(np.ones((20, 4)))
    assert mean == 1.0 and low < 0.9 and high == 1.0


def test_paired_difference_sees_what_separate_intervals_hide():
    rng = np.random.default_rng(1)
    a = rng.random((60, 1))
    mean, low, _ = paired_difference(a, a + 0.05)
    assert mean == pytest.approx(0.05) and low > 0.04


def test_pass_at_k_is_the_unbiased_estimator():
    assert pass_at_k(np.asarray([[1, 0, 0, 0]]), 2) == pytest.approx(0.5)
    assert pass_at_k(np.asarray([[1, 1, 0, 0], [0, 0, 0, 0]]), 4) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="between 1 and 4"):
        pass_at_k(np.zeros((1, 4)), 5)


def test_constant_baseline_is_the_share_of_the_most_common_answer():
    assert constant_baseline(["1", "2", "1", "3"]) == ("1", 0.5)


def test_calibration_error_is_small_for_honest_gaps_and_large_for_boasts():
    rng = np.random.default_rng(2)
    gaps = np.abs(rng.normal(0, 2, 20_000))
    honest = np.where(rng.random(20_000) < 1 / (1 + np.exp(-gaps)), gaps, -gaps)
    assert calibration_error(honest) < 0.02
    assert calibration_error(honest * 10) > 0.1

"""Intervals cover what they promise, comparisons are paired by problem, and estimators are unbiased."""

import dataclasses

import numpy as np
import pytest

from rlhf.tuning.evaluation.statistics import (
    calibration_error,
    constant_baseline,
    differences_from_first,
    majority,
    mean_interval,
    paired_difference,
    pass_at_k,
)
from rlhf.tuning.evaluation.verdicts import difference, judged
from rlhf.tuning.rows import VerdictRow


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


def test_copies_of_one_problem_are_one_problem():
    """A group of related problems is resampled as a whole: ten copies of each problem tell nothing new."""
    rng = np.random.default_rng(3)
    once = (rng.random((20, 1)) < 0.5).astype(float)
    copies, groups = np.repeat(once, 10, axis=0), np.repeat(np.arange(20), 10)
    _, low, high = mean_interval(once)
    _, narrow, wide = mean_interval(copies)
    assert wide - narrow < 0.5 * (high - low)
    assert mean_interval(copies, clusters=groups.tolist()) == pytest.approx(mean_interval(once))
    zeros = np.zeros((200, 1))
    assert paired_difference(zeros, copies, clusters=groups.tolist()) == pytest.approx(mean_interval(once))


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_few_clusters_are_seldom_called_different_by_chance(count):
    """Groups of problems move up or down together: the policies are even, and 5 % of the intervals may miss that."""
    rng, missed, trials = np.random.default_rng(count), 0, 300
    for _ in range(trials):
        names = np.repeat(np.arange(count), rng.integers(20, 60, count))
        gaps = rng.normal(0, 0.1, count)[names] + rng.normal(0, 0.05, len(names))
        _, low, high = paired_difference(np.zeros((len(names), 1)), gaps[:, None], clusters=names.tolist())
        missed += low > 0 or high < 0
    assert missed <= 0.08 * trials and (count > 1 or missed == 0)


def test_a_few_clusters_that_agree_still_leave_a_width():
    zeros, gains = np.zeros((50, 1)), (np.arange(50) % 10 < 1).astype(float)[:, None]
    for clusters in (["g"] * 50, ["g"] * 20 + ["h"] * 30, ["g"] * 25 + ["h"] * 25):
        mean, low, high = paired_difference(zeros, gains, clusters=clusters)
        assert mean == pytest.approx(0.1) and low < 0 < mean < high
        mean, low, high = mean_interval(gains, clusters=clusters)
        assert 0 <= low < mean < high <= 1 and high - low > 0.2
    # Three problems that gain a quarter each are no proof either, and one gain of any size is none.
    before = np.asarray([[0.1], [0.2], [0.3]])
    assert paired_difference(before, before + 0.25)[1] < 0
    assert paired_difference(zeros[:1], zeros[:1] + 7)[1] < 0
    # Nine that gain about as much are.
    assert paired_difference(zeros[:9], 0.3 + 0.02 * np.arange(9)[:, None])[1] > 0.3


def test_scores_of_any_range_have_an_interval():
    assert mean_interval(np.full((4, 2), 7.0)) == (7.0, 7.0, 7.0)


def test_what_has_no_score_is_no_problem():
    nan = np.nan
    correct = np.asarray([[1, nan], [0, 0], [nan, nan]])
    mean, _, _ = mean_interval(correct)
    assert mean == 0.5
    assert paired_difference(correct, np.asarray([[1, 1], [1, 0], [1, 1]]))[0] == pytest.approx(0.25)
    assert pass_at_k(correct, 1) == 0.5 and pass_at_k(correct, 2) == 0.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: mean_interval(np.zeros((0, 2))),
        lambda: mean_interval(np.full((2, 2), np.nan)),
        lambda: paired_difference(np.zeros((0, 2)), np.zeros((0, 2))),
        lambda: pass_at_k(np.zeros((0, 2)), 1),
        lambda: majority(np.zeros((0, 2)), []),
        lambda: constant_baseline([]),
    ],
)
def test_no_problem_is_named_as_the_cause(call):
    with pytest.raises(ValueError, match="at least one problem"):
        call()


def test_problems_that_all_stay_equal_still_leave_a_width():
    same = np.ones((20, 2))
    assert paired_difference(same, same) == pytest.approx((0, -0.161, 0.161), abs=1e-3)
    assert paired_difference(0 * same, same) == pytest.approx((1, 0.678, 1), abs=1e-3)


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


def test_pass_at_k_rises_from_the_mean_to_any_right():
    correct = np.random.default_rng(4).random((50, 6)) < 0.3
    rates = [pass_at_k(correct, k) for k in range(1, 7)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(correct.mean()) and rates[-1] == pytest.approx(correct.any(axis=1).mean())


def test_the_majority_decides_and_ties_are_shared():
    answers = [["1", "1", "2", None], ["1", "2", "3", "4"], [None] * 4]
    correct = np.asarray([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert majority(correct, answers) == pytest.approx((1 + 0.25 + 0) / 3)
    assert majority(correct[:1], [["1", "1", "2", "2"]]) == 0.5


def test_constant_baseline_is_the_share_of_the_most_common_answer():
    assert constant_baseline(["1", "2", "1", "3"]) == ("1", 0.5)
    assert constant_baseline(["8", "7.0", "8", "7", "7.00"], ["8.0", "7.0", "8.0", "7.0", "7.0"]) == ("7.0", 0.6)


def test_calibration_error_is_small_for_honest_gaps_and_large_for_boasts():
    rng = np.random.default_rng(2)
    gaps = np.abs(rng.normal(0, 2, 20_000))
    honest = np.where(rng.random(20_000) < 1 / (1 + np.exp(-gaps)), gaps, -gaps)
    assert calibration_error(honest) < 0.02
    assert calibration_error(honest * 10) > 0.1


def test_one_cluster_of_equal_scores_does_not_tell_how_clusters_differ():
    assert mean_interval(np.full((5, 1), 2.0), clusters=["c"] * 5) == (2.0, 0.0, 2.0)
    assert mean_interval(np.full((5, 1), -1.0), clusters=["c"] * 5) == (-1.0, -1.0, 1.0)


def verdicts(correct_PS):
    return [
        VerdictRow(
            place=p, prompt_id="same", sample=s, group=f"g{p}", judge="j", answer=None, score=float(v), failure=None
        )
        for p, row in enumerate(correct_PS) for s, v in enumerate(row)
    ]  # fmt: skip


def test_a_small_gain_on_every_problem_is_seen_where_intervals_overlap():
    rng = np.random.default_rng(0)
    easy = rng.random((60, 4)) < rng.beta(0.5, 0.5, (60, 1))
    better = easy | (rng.random((60, 4)) < 0.15)
    before, after = judged(verdicts(easy), 4), judged(verdicts(better), 4)
    assert after.score()["score_low"] < before.score()["score_high"]
    found = difference(before, after)
    assert found.verdict == "better" and found.mean == pytest.approx(better.mean() - easy.mean())
    assert difference(after, before).verdict == "worse" and difference(before, before).verdict == "even"
    assert found.problems == 60


def test_order_of_the_tables_and_further_problems_change_nothing():
    before, after = verdicts(np.eye(6)[:, :2]), verdicts(1 - np.eye(6)[:, :2])
    expected = difference(judged(before, 2), judged(after, 2))
    assert difference(judged(before[::-1], 2), judged(after[2:] + after[:2], 2)) == expected
    fewer = difference(judged(before[:8], 2), judged(after, 2))
    assert fewer.problems == 4


def test_problems_of_another_evaluation_are_refused():
    other = [dataclasses.replace(v, group="other") for v in verdicts(np.eye(4))]
    with pytest.raises(ValueError, match="different problems"):
        difference(judged(verdicts(np.eye(4)), 4), judged(other, 4))


SWEEPS, PROBLEMS, SAMPLES = 1000, 96, 4


def sweep(rng, settings, seeds, of_seed=0.0, gains=None):
    """The runs of each setting but the first, paired with the first one's by seed; `gains`: in log-odds by setting."""
    ability_P = rng.normal(0, 1.5, PROBLEMS)
    shift_KR = rng.normal(0, of_seed, (settings, seeds)) + np.asarray(gains or [0.0] * settings)[:, None]
    logits_KRP = ability_P + shift_KR[..., None] + rng.normal(0, of_seed, (1, seeds, 1))
    right = rng.random((settings, seeds, PROBLEMS, SAMPLES)) < 1 / (1 + np.exp(-logits_KRP[..., None]))
    groups = list(range(PROBLEMS))
    return [[(right[0, r], right[k, r], groups) for r in range(seeds)] for k in range(1, settings)]


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "seeds", "of_seed"), [(6, 1, 0.0), (4, 3, 0.5), (2, 2, 0.5)], ids=str)
def test_at_most_one_sweep_in_twenty_finds_a_difference_where_there_is_none(settings, seeds, of_seed):
    rng = np.random.default_rng(0)
    found = [differences_from_first(sweep(rng, settings, seeds, of_seed), settings - 1) for _ in range(SWEEPS)]
    wrong = sum(any(low > 0 or high < 0 for _, low, high in sweep) for sweep in found)
    assert wrong <= SWEEPS // 20


def test_without_the_correction_or_the_seeds_many_more_would():
    rng = np.random.default_rng(0)
    single = [differences_from_first(sweep(rng, 12, 1), 1) for _ in range(50)]
    assert sum(any(low > 0 or high < 0 for _, low, high in sweep) for sweep in single) > 5
    lucky = [sweep(rng, 2, 3, of_seed=0.5)[0] for _ in range(50)]
    pooled = [[np.concatenate([r[i] for r in runs]) for i in (0, 1)] for runs in lucky]
    alone = [paired_difference(*sides) for sides in pooled]
    assert sum(low > 0 or high < 0 for _, low, high in alone) > 10


def test_a_large_difference_is_found_with_and_without_seeds():
    rng = np.random.default_rng(0)
    for seeds, of_seed in ((1, 0.0), (3, 0.1)):
        small, large = differences_from_first(sweep(rng, 3, seeds, of_seed, [0.0, 0.0, 2.0]), 2)
        assert large[1] > 0.1 and small[1] < 0 < small[2]


def test_an_effect_of_a_seed_on_all_settings_is_none_of_a_setting():
    """One seed is easier for both settings: the difference of each seed is the same, and so is the interval."""
    first = np.zeros((40, 1))
    first[:20] = 1.0
    gain = first.copy()
    gain[20:30] = 1.0
    groups = list(range(40))
    mean, low, high = differences_from_first([[(first, gain, groups), (first[::-1], gain[::-1], groups[::-1])]], 1)[0]
    assert (mean, low, high) == pytest.approx(paired_difference(first, gain, clusters=groups), abs=0.03)

"""Intervals of several settings against a first one hold together: without a difference, few sweeps find one."""

import numpy as np
import pytest

from rlhf.tuning.evaluation.statistics import differences_from_first, paired_difference

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

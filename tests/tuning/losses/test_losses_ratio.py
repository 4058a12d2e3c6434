"""Quantiles of the ratio between trainer and sampler, from counts in bins."""

import math

import jax.numpy as jnp
import pytest

from rlhf.tuning.losses.importance import RATIO_EDGES, log_ratio_bins, ratio_quantile


def quantiles(log_ratios):
    old = jnp.asarray([log_ratios])
    found = log_ratio_bins(old, jnp.zeros_like(old), jnp.ones_like(old))
    bins = [float(found[f"ratio_bin_{i:02d}"]) for i in range(len(RATIO_EDGES) + 1)]
    return [ratio_quantile(bins, share) for share in (0.01, 0.5, 0.99)]


def test_a_trainer_that_agrees_with_the_sampler_has_ratios_of_1():
    assert quantiles([0.0] * 100) == [1.0, 1.0, 1.0]
    assert quantiles([5e-4, -5e-4] * 50) == [1.0, 1.0, 1.0]


def test_quantiles_lie_in_the_bin_of_what_they_are_of():
    low, middle, high = quantiles([-0.4] * 10 + [0.0] * 80 + [0.25] * 10)
    assert math.exp(-0.5) <= low <= math.exp(-0.3) and middle == 1.0 and math.exp(0.2) <= high <= math.exp(0.3)


def test_what_is_beyond_all_borders_counts_as_the_border():
    assert quantiles([9.0] * 100) == pytest.approx([math.exp(2.0)] * 3)

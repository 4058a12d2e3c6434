"""The order of an epoch is the one that Grain draws, and has every number once."""

import grain.python as grain
import numpy as np
import pytest

from rlhf.tuning.data.shuffle import shuffled


@pytest.mark.parametrize("count", [1, 2, 257, 65_536, 65_538])
@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_the_order_is_grains(count, seed):
    order = grain.MapDataset.range(count).shuffle(seed=seed)
    positions = np.random.default_rng(0).permutation(count)[:500]
    assert shuffled(positions, count, seed).tolist() == [order[int(position)] for position in positions]


def test_each_number_comes_once_where_grain_repeats_one():
    assert sorted(shuffled(np.arange(65_537), 65_537, 3).tolist()) == list(range(65_537))

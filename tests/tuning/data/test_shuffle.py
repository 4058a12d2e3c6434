"""The order of an epoch is the one that Grain draws, of many places at once, and has every number once."""

import sys

import grain.python as grain
import numpy as np
import pytest

from rlhf.tuning.data import shuffled as module
from rlhf.tuning.data.reading import Steps
from rlhf.tuning.data.shuffle import shuffled


@pytest.mark.parametrize("count", [1, 2, 3, 255, 257, 1000, 65_536, 65_538])
@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**32 - 1])
def test_the_order_is_grains(count, seed):
    order = grain.MapDataset.range(count).shuffle(seed=seed)
    places = np.random.default_rng(0).permutation(count)[:500]
    assert shuffled(places, count, seed).tolist() == [order[int(place)] for place in places]


@pytest.mark.parametrize("count", [65_537, 262_145])
def test_each_number_comes_once_where_grain_repeats_one(count):
    """Grain's cipher has a bit too few for the last place of 2^16 + 1."""
    assert sorted(shuffled(np.arange(count), count, 3).tolist()) == list(range(count))


def test_many_places_are_ordered_in_pieces(monkeypatch):
    whole = shuffled(np.arange(5000), 5000, 1)
    monkeypatch.setattr(module, "AT_A_TIME", 37)
    assert shuffled(np.arange(5000), 5000, 1).tolist() == whole.tolist()
    assert shuffled(np.arange(4998).reshape(2, -1), 5000, 1).tolist() == whole[:4998].reshape(2, -1).tolist()


def test_steps_of_many_examples_are_cut_without_a_call_for_each():
    sizes = np.random.default_rng(0).integers(1, 40, 100_000)
    calls = 0

    def counted(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        steps = Steps(sizes, 1, 0, tokens=20_000)
    finally:
        sys.setprofile(None)
    assert len(steps) > 90 and calls < 2000
    assert 0 < sizes[steps[7]].sum() <= 20_000

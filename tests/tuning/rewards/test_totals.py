"""Several rewards become one number: weighted, normalised and clipped in a fixed order, without what failed."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.algorithms.advantages import group_advantages
from rlhf.tuning.rewards.samples import Outcome
from rlhf.tuning.rewards.totals import Part, RewardFailed, bounded, scales_of, totals

GROUPS = [0, 0, 1, 1]


def given(*values):
    """Outcomes: a text is the cause of a failure."""
    return [Outcome(None, v) if isinstance(v, str) else Outcome(v) for v in values]


def test_a_failure_drops_counts_as_zero_or_stops():
    column = given(1.0, "timeout", 1.0, 0.0)
    found, failures = totals([column], [Part("a")], GROUPS)
    assert np.isnan(found[1]) and np.isfinite(found[[0, 2, 3]]).all() and failures[1] == "a: timeout"
    assert totals([column], [Part("a", on_failure="zero")], GROUPS)[0].tolist() == [1.0, 0.0, 1.0, 0.0]
    with pytest.raises(RewardFailed, match="reward a failed on completion 1 of the round: timeout"):
        totals([column], [Part("a", on_failure="stop")], GROUPS)


def test_a_completion_to_which_no_reward_applies_leaves_the_round_or_counts_as_zero():
    columns = [given(None, 1.0, None, "timeout"), given(None, None, 2.0, None)]
    parts = [Part("a", on_failure="zero"), Part("b")]
    found, failures = totals(columns, parts, GROUPS)
    np.testing.assert_array_equal(found, [np.nan, 1.0, 2.0, 0.0])
    assert failures == [None, None, None, "a: timeout"]
    assert totals(columns, parts, GROUPS, "zero")[0].tolist() == [0.0, 1.0, 2.0, 0.0]


def test_the_size_of_a_reward_does_not_round_away_what_tells_a_group_apart():
    near, far = ([Outcome(value=base + 0.01 * i) for i in range(len(GROUPS))] for base in (0.0, 1e6))
    part = Part("a", normalise="group")
    np.testing.assert_allclose(totals([far], [part], GROUPS)[0], totals([near], [part], GROUPS)[0], atol=1e-5)


def test_totals_on_a_given_scale_and_where_the_round_ties():
    part = Part("a", normalise="batch")
    every, some = given(1.0, 3.0, 10.0, 14.0), given(10.0, 20.0)
    whole = totals([every], [part], GROUPS)[0]
    assert totals([some], [part], [0, 1], scales=scales_of([every], [part]))[0][0] == whole[2]
    tied = scales_of([given(2.0, 2.0, None)], [part])
    # Only centred: there is no deviation to divide by.
    np.testing.assert_allclose(totals([some], [part], [0, 1], scales=tied)[0], [8.0, 18.0], rtol=2e-4)
    assert scales_of([every], [Part("a", normalise="group")]) == {}


@pytest.mark.parametrize("values", [[0.1] * 3, [0.9] * 100, [0.1 + 0.2, 0.3, 0.3], [1e-12] * 5, [0.0, 0.0], []])
def test_rewards_that_are_equal_but_for_rounding_have_no_deviation(values):
    """The mean of three times 0.1 is not 0.1, and a deviation of 1e-17 would make a refill's total 5000."""
    mean, deviation = scales_of([given(*values)], [Part("a", normalise="batch")])["a"]
    assert deviation == 1.0 and mean == pytest.approx(np.mean(values) if values else 0.0)


def test_a_value_whose_square_float32_cannot_hold_has_failed():
    """Its group would have a deviation that is infinite, and advantages of 0."""
    said = "1e+20 with weight 1 is beyond 1e+15: clip it, or lower its weight"
    assert bounded(Outcome(1e20), Part("a")) == Outcome(None, said)
    assert bounded(Outcome(-1e14), Part("a", weight=100.0)).failure is not None
    for outcome in (Outcome(1.0), Outcome(None), Outcome(None, "timeout")):
        assert bounded(outcome, Part("a", weight=100.0)) == outcome
    assert bounded(Outcome(1e20), Part("a", clip=(-1.0, 1.0))) == Outcome(1e20)
    values = np.asarray([1e15, -1e15, 0.0, 0.0], np.float32)
    for normalisation in ("std", "batch-std"):
        found = np.asarray(group_advantages(jnp.asarray(values), np.zeros(4, int), normalisation=normalisation))
        np.testing.assert_allclose(found, [1.2247, -1.2247, 0, 0], atol=1e-3)

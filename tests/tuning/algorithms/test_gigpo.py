"""GiGPO: states that do not meet, ties, and the filter of groups by their variety (its formula: the oracle)."""

import dataclasses

import numpy as np
import pytest

from rlhf.tuning.algorithms.algorithm import Scored, find
from rlhf.tuning.algorithms.flat import Column
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.selection import Selection
from rlhf.tuning.algorithms.turns import Turns
from rlhf.tuning.losses.groups import most_varied_groups
from tests.tuning.algorithms.support import settings
from tests.tuning.algorithms.trajectories import tables

pytestmark = pytest.mark.usefixtures("float64")


def scored(config, change=lambda rollouts, scores, turns: (rollouts, scores, turns)):
    rollouts, scores, turns = change(*tables(at=(2,)))
    return Selection.of(RoundData.from_rows(rollouts, scores, turns=turns), config), turns


def test_without_states_that_meet_a_trajectory_weighs_by_its_turns_in_the_mean_of_its_group():
    """Rewards 1, 0, 0, 0 of trajectories of 2, 8, 8 and 8 turns: 0.923 and -0.077 in the authors' code."""
    counts, rewards = [2, 8, 8, 8], np.asarray([1, 0, 0, 0], np.float32)
    numbers_NT = np.asarray([[u if u < count else -1 for u in range(8)] for count in counts])
    states = [[f"{i} {u}" for u in range(count)] for i, count in enumerate(counts)]
    mask_NT = (numbers_NT >= 0).astype(float)
    found = Scored(rewards, np.zeros(4, int), np.ones(4, bool), Column.of(mask_NT), Column.of(0 * mask_NT))
    found = dataclasses.replace(
        found, turns=Turns(numbers_NT, 0 * mask_NT, states, rewards < 0), turn_rewards_NT=0 * mask_NT
    )
    advantages = np.asarray(find(settings("gigpo").objective).advantages(found))
    expected = rewards - np.repeat(rewards, counts).mean()
    np.testing.assert_allclose(advantages[:, 0], expected, atol=1e-12)
    np.testing.assert_allclose(expected[:2], [0.9230769, -0.0769231], atol=1e-6)


def test_a_group_that_ties_on_the_whole_may_differ_by_when_it_earned():
    def tied(rollouts, scores, turns):
        return rollouts, [dataclasses.replace(s, total=0.5) for s in scores], turns

    config = settings("gigpo", kl_coef=0.0)
    found, _ = scored(config, tied)
    assert found.signal_N.all()
    assert not scored(settings("grpo", kl_coef=0.0), tied)[0].signal_N.any()
    # Where states do not meet either, nothing is left to learn.
    states = [[f"{i} {u}" for u in range(3)] for i in range(6)]
    found.scored = dataclasses.replace(found.scored, turns=dataclasses.replace(found.scored.turns, states=states))
    assert not found.signal_N.any()


def test_states_are_asked_for_by_name():
    def blind(rollouts, scores, turns):
        return rollouts, scores, [dataclasses.replace(t, state=None) for t in turns]

    config = settings("gigpo")
    found, _ = scored(config, blind)
    with pytest.raises(ValueError, match="the rollouts have no states: sample them from an environment whose `info`"):
        find(config.objective).advantages(found.scored)


def test_the_most_varied_groups_stay_and_of_equal_ones_the_first():
    groups = np.repeat([4, 7, 2, 9], 3)
    rewards = np.asarray([0, 0, 1, 1, 1, 1, 0, 1, 0, 0, 9, 9], np.float32)
    valid = np.ones(12, bool)
    assert set(groups[most_varied_groups(rewards, groups, valid, 0.5)]) == {9, 2}
    assert set(groups[most_varied_groups(rewards, groups, valid, 0.51)]) == {9, 2, 4}
    # A group with one valid completion has no deviation.
    valid[9] = valid[10] = False
    assert set(groups[most_varied_groups(rewards, groups, valid, 0.1)]) == {2}


@pytest.mark.slow
def test_filtered_groups_leave_whitening_too():
    rollouts, scores, _ = tables()
    data = RoundData.from_rows(rollouts, scores)
    config = settings("reinforce-pp-baseline", keep_most_varied=0.4, kl_coef=0.0)
    found = Selection.of(data, config).scored
    assert found.valid_N.tolist() == [True] * 3 + [False] * 3
    first = RoundData.from_rows(rollouts[:3], scores[:3])
    alone = Selection.of(first, settings("reinforce-pp-baseline", kl_coef=0.0)).scored
    algorithm = find(config.objective)
    width = alone.mask_NT.shape[1]
    np.testing.assert_array_equal(algorithm.advantages(found)[:3, :width], algorithm.advantages(alone))

"""GiGPO's advantages against plain loops over states, and the filter of groups by their variety."""

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


def compared(values, normalisation):
    deviation = np.asarray(values) - np.mean(values)
    if len(values) < 2 or np.ptp(values) < 1e-6:
        return 0.0 * deviation
    return deviation / (np.std(values, ddof=1) + 1e-4) if normalisation == "std" else deviation


@pytest.mark.parametrize("normalisation", ["none", "std"])
def test_advantages_are_those_of_a_plain_loop(normalisation):
    config = settings("gigpo", normalisation=normalisation, step_gamma=0.6, step_advantage_w=0.7)
    chosen, turns = scored(config)
    found = chosen.scored
    names = sorted({(t.place, t.sample) for t in turns})
    totals = dict(zip(names, found.totals_N.tolist(), strict=True))
    returns, states = {}, {}
    for name in names:
        own = [t for t in turns if (t.place, t.sample) == name]
        earned = [t.reward for t in own]
        # The rest of the total is the last turn's.
        earned[-1] = totals[name] - sum(earned[:-1])
        for u in range(len(own)):
            returns[*name, u] = sum(0.6 ** (v - u) * earned[v] for v in range(u, len(own)))
            states.setdefault((name[0], own[u].state), []).append((*name, u))
    of_turn, alone = {}, 0
    for members in states.values():
        alone += len(members) == 1
        of_turn |= dict(zip(members, compared([returns[m] for m in members], normalisation), strict=True))
    assert alone and len(states) > alone
    advantages = np.asarray(find(config.objective).advantages(found))
    for i, name in enumerate(names):
        # verl-agent, gigpo/core_gigpo.py, episode_norm_reward, compute_mean_std_cross_steps: one score a step.
        group = [totals[t.place, t.sample] for t in turns if t.place == name[0]]
        episode = compared(group, normalisation)[group.index(totals[name])]
        for t in np.flatnonzero(found.mask_NT[i]):
            wanted = episode + 0.7 * of_turn[*name, int(found.turns.number_NT[i, t])]
            # Rewards of turns are float32, as in their table.
            assert advantages[i, t] == pytest.approx(wanted, rel=1e-5, abs=1e-6)


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

"""Rounds of RL on real rollouts of a small model raise the reward, and leave alone what carries no signal."""

import dataclasses
import gc
import tracemalloc

import jax
import numpy as np
import pytest

from rlhf.tuning.algorithms.algorithm import Scored, group_relative, informative
from rlhf.tuning.algorithms.flat import Column
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.rounds import Mismatch, run_round
from rlhf.tuning.algorithms.selection import Selection
from rlhf.tuning.algorithms.settings import CriticSettings
from rlhf.tuning.settings import OptimizerSettings
from tests.tuning.algorithms.support import PROMPTS, learners, play, rollouts, settings, trained
from tests.tuning.tiny import CONFIG, PARAMS


def test_grpo_raises_the_reward():
    rewards, metrics = play(settings(), 8)
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.15
    assert all(abs(m["mismatch_kl"]) < 1e-5 for m in metrics)
    assert metrics[0]["steps"] == 2


@pytest.mark.slow
def test_ppo_raises_the_reward_and_its_critic_learns():
    critic = CriticSettings(optimizer=OptimizerSettings(learning_rate=0.01))
    rewards, metrics = play(settings("ppo", critic=critic, kl_in_reward=0.0), 8)
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1
    assert metrics[-1]["value_loss"] < metrics[0]["value_loss"]


def test_groups_without_variance_and_failed_samples_leave_the_update():
    totals = np.asarray([1, 1, 1, 0, 1, np.nan, 0.5, np.nan], np.float32)
    groups = np.asarray([0, 0, 1, 1, 2, 2, 3, 3])
    valid = np.isfinite(totals)
    scored = Scored(np.where(valid, totals, 0), groups, valid, Column.of(np.ones((8, 1))), Column.of(np.zeros((8, 1))))
    assert informative(scored).tolist() == [False, False, True, True, False, False, False, False]
    found = group_relative("std")(scored)
    assert found[5] == 0 and np.isfinite(found).all() and found[2] == -found[3] > 0


@pytest.mark.slow
def test_a_round_without_any_signal_changes_nothing():
    rows, scores = rollouts(PARAMS, 0)
    config = settings()
    data = RoundData.from_rows(rows, [dataclasses.replace(s, total=1.0) for s in scores])
    result = trained(config, data)
    # Its steps have no gradient, and the optimizer no momentum yet.
    assert result.metrics["steps"] == 2 and result.metrics["informative"] == 0
    jax.tree.map(np.testing.assert_array_equal, result.policy.params, PARAMS)
    dropped = dataclasses.replace(config, tied_groups="drop")
    result = run_round(data, dropped, CONFIG, start := learners(dropped)[0])
    assert result.metrics["steps"] == 0 and result.policy.params is start.params


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [1, 6])
def test_a_round_that_ties_on_the_task_moves_no_policy_by_whitened_noise(prompts):
    """Divided by their spread over the round, a critic's error or a KL of any size would be advantages of 1."""
    rows, scores = rollouts(PARAMS, 0)
    some = slice(prompts * 8)
    data = RoundData.from_rows(rows[some], [dataclasses.replace(s, total=1.0) for s in scores[some]])
    moved = jax.tree.map(lambda x: 1.1 * x, PARAMS)

    def played(algorithm, **changes):
        config = settings(algorithm, **changes)
        start, critic = learners(config)
        return start.params, run_round(data, config, CONFIG, start, critic, reference=moved)

    params, result = played("ppo")
    assert result.policy.params is params and not result.trained_N.any() and not result.signal_N.any()
    # The critic learns from equal rewards as from others.
    assert result.metrics["steps"] == 0 and result.metrics["value_loss"] > 0
    assert result.metrics["tied"] == prompts and result.metrics["advantage_spread"] == 0
    with_bonus = played("ppo", entropy_coef=0.01)[1].metrics
    assert with_bonus["steps"] > 0 and with_bonus["advantage_spread"] == 0
    for algorithm in ("reinforce-pp", "reinforce-pp-baseline", "grpo"):
        changes = {"kl_in_reward": 0.1} | ({"normalisation": "batch-std"} if algorithm == "grpo" else {})
        params, result = played(algorithm, **changes, tied_groups="drop")
        assert result.metrics["steps"] == 0 and result.policy.params is params
        held = played(algorithm, **changes, kl_coef=0.1)[1].metrics
        assert held["steps"] > 0 and held["advantage_spread"] == 0


@pytest.mark.slow
def test_a_round_that_ties_on_the_task_trains_on_its_kl():
    rows, scores = rollouts(PARAMS, 0)
    config = settings("rloo", prompts_per_step=6)
    data = RoundData.from_rows(rows, [dataclasses.replace(s, total=1.0) for s in scores])

    def metrics(reference):
        return trained(config, data, reference=reference).metrics

    moved = jax.tree.map(lambda x: 1.1 * x, PARAMS)
    still = metrics(PARAMS)
    assert still["steps"] == 1 and still["grad_norm"] == still["advantage_spread"] == 0
    assert metrics(moved)["steps"] == 1 and metrics(moved)["advantage_spread"] > 0


@pytest.mark.slow
def test_a_step_that_is_skipped_adapts_nothing():
    rows, scores = rollouts(PARAMS, 0)
    config = settings(kl_coef=0.1, kl_target=0.01, prompts_per_step=6)
    nowhere = jax.tree.map(lambda x: np.nan * x, PARAMS)
    result = trained(config, RoundData.from_rows(rows, scores), reference=nowhere)
    assert result.metrics["skipped"] == result.metrics["steps"] == 1
    assert result.coefficients.kl_scale == 1.0
    assert all(np.isfinite(v) for v in result.metrics.values() if isinstance(v, float))
    for now, before in zip(jax.tree.leaves(result.policy.params), jax.tree.leaves(PARAMS), strict=True):
        np.testing.assert_array_equal(now, before)


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_sampler_that_disagrees_with_the_trainer_ends_the_round(epochs):
    rows, scores = rollouts(PARAMS, 0)
    data = RoundData.from_rows([dataclasses.replace(r, logprobs=[x - 1 for x in r.logprobs]) for r in rows], scores)
    config = settings(epochs=epochs, prompts_per_step=6)
    with pytest.raises(Mismatch, match=r"is above max_mismatch_kl 0.1; .*a lower rl.staleness\)"):
        trained(config, data)


@pytest.mark.slow
def test_a_round_of_empty_completions_has_numbers_for_metrics():
    rows, scores = rollouts(PARAMS, 0)
    data = RoundData.from_rows([dataclasses.replace(r, token_ids=[], logprobs=[]) for r in rows], scores)
    config = settings(epochs=2, prompts_per_step=6)
    metrics = trained(config, data).metrics
    assert all(np.isfinite(v) for v in metrics.values() if isinstance(v, float))


def test_steps_are_even():
    ones = np.ones(9, np.float32)
    data = RoundData([[1]] * 9, [[2]] * 9, [[0.0]] * 9, np.arange(9), ones, ones > 0, ones < 0)
    every, none = np.ones(9, bool), np.zeros(9, bool)
    assert [len(s) for s in data.divided(every, every, 8).groups] == [4, 5]
    assert data.divided(none, none, 8).groups == []


@pytest.mark.parametrize(
    ("changes", "learns"),
    [
        # One total in all of the round: only batch baselines and a KL in the reward take steps.
        ({"algorithm": "reinforce-pp", "kl_in_reward": 0.01}, (False, True, True)),
        ({"algorithm": "reinforce-pp-baseline"}, (False, False, True)),
        ({"algorithm": "rloo", "kl_in_reward": 0.01}, (False, False, True)),
        ({"algorithm": "grpo", "kl_coef": 0.1}, (False, False, True)),
        ({"algorithm": "remax"}, (False, True, True)),
        ({"algorithm": "dapo", "truncated": "mask-loss"}, (False, False, False)),
    ],
)
def test_a_round_counts_the_groups_that_the_task_tells_apart_before_any_kl(changes, learns):
    """Totals of one value, of one for each prompt, and of several; all of them cut off where that is masked."""
    config = settings(**changes)
    groups, alone = np.arange(8) // 2, np.ones(8, bool)
    cut = alone if "truncated" in changes else ~alone
    for totals, expected in zip((0 * groups, groups, np.arange(8)), learns, strict=True):
        data = RoundData([[1]] * 8, [[2]] * 8, [[0.0]] * 8, groups, totals.astype(np.float32), alone, cut)
        if config.needs_greedy:
            data = dataclasses.replace(data, greedy_N=np.zeros(8, np.float32))
        assert (Selection.of(data, config).informative_count() > 0) == expected


@pytest.mark.slow
def test_epochs_and_steps_hold_no_more_of_a_round_at_once():
    """Steps are packed when a pass comes to them, one ahead: more passes, and as many bytes."""
    rng, count = np.random.default_rng(0), 32
    lengths = rng.integers(40, 90, count)
    ones = np.ones(count, bool)
    data = RoundData(
        [PROMPTS[0]] * count, [rng.integers(0, 97, n) for n in lengths], [np.full(n, -4.5) for n in lengths],
        np.arange(count) // 4, (np.arange(count) % 2).astype(np.float32), ones, ~ones,
    )  # fmt: skip

    def peak(epochs):
        config = settings(epochs=epochs, prompts_per_step=2)
        start, _ = learners(config)
        gc.collect()
        tracemalloc.start()
        try:
            run_round(data, config, CONFIG, start)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    # The first compiles.
    peak(1)
    assert peak(3) < 1.2 * peak(1)

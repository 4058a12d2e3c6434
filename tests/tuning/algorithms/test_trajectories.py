"""Trajectories of several turns: each is one completion, whatever its rows (R27; formulas: the oracle)."""

import dataclasses

import jax
import numpy as np
import pytest

from rlhf.tuning.agents.contract import Task
from rlhf.tuning.agents.trajectory import Ended, Episode, Turn, completion_rows, turn_rows
from rlhf.tuning.algorithms import ppo
from rlhf.tuning.algorithms.algorithm import Scored
from rlhf.tuning.algorithms.flat import Column
from rlhf.tuning.algorithms.learner import Learner
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.rounds import run_round
from rlhf.tuning.algorithms.selection import Selection
from rlhf.tuning.algorithms.settings import CriticSettings
from rlhf.tuning.models import huggingface
from rlhf.tuning.models.config import tiny
from rlhf.tuning.precision import using
from rlhf.tuning.rows import PromptRow, ScoreRow
from rlhf.tuning.settings import ComputeSettings, OptimizerSettings
from rlhf.tuning.training.step import copy
from tests.tuning.algorithms.support import settings
from tests.tuning.algorithms.trajectories import TOTALS, VOCABULARY, tables

CONFIG = dataclasses.replace(tiny(VOCABULARY), hidden_size=16, num_layers=1, intermediate_size=24)
SLOW = OptimizerSettings(learning_rate=1e-3)
FLOAT64 = {"compute": ComputeSettings(dtype="float64"), "max_mismatch_kl": 1e9, "prompts_per_step": 2}


@pytest.fixture(autouse=True)
def float64():
    quick = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    with using("float64"):
        yield
    jax.config.update("jax_disable_most_optimizations", quick)


def params(seed):
    # Larger weights than at random: distributions are not flat, so that each context gives other numbers.
    return jax.tree.map(lambda x: 6.0 * x, huggingface.random_params(CONFIG, seed))


def trained(config, rollouts, scores, turns):
    """Parameters, metrics and the round's result."""
    critic = None
    if config.needs_critic:
        head = jax.random.normal(jax.random.key(0), (CONFIG.hidden_size,))
        critic = Learner.start(huggingface.scalar_head_params(CONFIG, params(2), head), config.critic.optimizer)
    data = RoundData.from_rows(rollouts, scores, turns=turns)
    policy = Learner.start(copy(params(1)), config.optimizer)
    result = run_round(data, config, CONFIG, policy, critic, reference=params(3) if config.needs_reference else None)
    learners = [result.policy.params] + ([] if critic is None else [result.critic.params])
    return jax.tree.leaves(learners), result


def candidates(config, rollouts, scores, turns=None):
    """Which completions a round would train on, before anything is computed."""
    data = RoundData.from_rows(rollouts, scores, turns=turns)
    return Selection.of(data, config).candidates()


def test_a_pair_behind_two_contexts_is_refused_by_name():
    with pytest.raises(ValueError, match="'online-dpo' compares two completions of one prompt, and those of group 1"):
        candidates(settings("online-dpo"), *tables())
    with pytest.raises(ValueError, match="of group 0 of the round have other contexts"):
        candidates(settings("online-dpo"), *tables(at=(1,), apart=False))
    assert candidates(settings("online-dpo"), *tables(apart=False)).sum() == 4


ROUNDS = {
    "dapo": {"optimizer": SLOW},
    "gmpo": {"optimizer": SLOW, "epochs": 2},
    "ppo": {
        "optimizer": SLOW,
        "kl_in_reward": 0.1,
        "critic": CriticSettings(optimizer=SLOW, gamma=0.9, lam=0.8, bootstrap_truncated=True, whiten_rewards=True),
    },
    "gigpo": {"optimizer": SLOW},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDS)
def test_rows_of_a_trajectory_change_no_gradient(name):
    config = settings(name, **FLOAT64 | ROUNDS[name])
    whole, of_whole = trained(config, *tables())
    # Each turn in a row of its own, in micro-batches that would hold one row each.
    small = dataclasses.replace(config, compute=ComputeSettings(dtype="float64", tokens_per_micro_batch=64))
    parts, of_parts = trained(small, *tables(at=(1, 2)))
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * np.abs(a).max())
    for key in ("loss", "grad_norm", "approx_kl", "entropy", "advantage_spread", "kept"):
        assert of_parts.metrics[key] == pytest.approx(of_whole.metrics[key], rel=1e-9, abs=1e-12), key
    assert of_whole.metrics["completions"] == of_parts.metrics["completions"] == len(TOTALS)


def test_an_episode_that_ends_with_a_turn_at_its_limit_is_truncated_and_has_no_value_after_it():
    """Masks read the stop of the last turn, bootstrapping whether the environment ended the episode."""
    turn = Turn(0, [7, 8, 9], [-1.0] * 3, "5 because", "length", reward=1.0, terminated=True, success=True)
    found = []
    for status, terminated in (("done", True), ("turn_limit", False)):
        turn.terminated = terminated
        ended = Ended(Episode(0, 0, "guess-1", Task(seed=1, row={})), [1, 2], [turn], status, None, 1, [], 0.0)
        prompt = PromptRow(id="guess-1", prompt_ids=[1, 2], prompt="guess 1")
        rows, scores = completion_rows(ended, prompt, "p", 0, 1.0), [ScoreRow(place=0, prompt_id="guess-1", total=1.0)]
        data = RoundData.from_rows(rows, scores, turns=turn_rows(ended, "p"))
        assert data.truncated_N.tolist() == [True] and data.unfinished_N.tolist() == [not terminated]
        zeros = np.zeros((1, 3))
        scored = Scored(np.ones(1), np.zeros(1, int), np.ones(1, bool), Column.of(zeros + 1), Column.of(zeros))
        after = 0.8 * data.unfinished_N
        critic = CriticSettings(optimizer=SLOW, bootstrap_truncated=True, lam=1.0)
        found.append(ppo.token_advantages(scored, Column.of(zeros), after, critic)[1].gather([0])[0].tolist())
    np.testing.assert_allclose(found, [[1, 1, 1], [1.8, 1.8, 1.8]], rtol=1e-6)


def test_a_failed_episode_leaves_everything_and_a_limit_goes_on():
    rollouts, scores, turns = tables()
    rollouts[0] = dataclasses.replace(rollouts[0], stop="failed")
    data = RoundData.from_rows(rollouts, scores, turns=turns)
    assert data.valid_N.tolist() == [False] + [True] * 5
    found = Selection.of(data, settings("ppo")).scored
    assert found.mask_NT[0].sum() == 0 == np.abs(found.turn_rewards_NT[0]).sum()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: [dataclasses.replace(t[0], start=1), *t[1:]], "do not belong together"),
        (lambda t: t[:1] + t[2:], r"turns of place 0, sample 0 are numbered \[0, 2\]"),
        (lambda t: t[:2] + t[3:], "token 8 of place 0, sample 0 has a log-probability of the sampler, and no turn"),
    ],
)
def test_turns_of_other_tokens_are_refused(change, message):
    rollouts, scores, turns = tables()
    with pytest.raises(ValueError, match=message):
        RoundData.from_rows(rollouts, scores, turns=change(turns))


def test_parts_of_a_trajectory_are_all_there():
    rollouts, scores, _ = tables(at=(1, 2))
    with pytest.raises(ValueError, match=r"place 0, sample 0 are parts \[0, 2\]"):
        RoundData.from_rows([row for row in rollouts if (row.place, row.sample, row.part) != (0, 0, 1)], scores)


def test_turns_are_asked_for_by_name():
    rollouts, scores, _ = tables()
    data = RoundData.from_rows(rollouts, scores)
    with pytest.raises(ValueError, match="credit: turn needs turns"):
        Selection.of(data, settings("ppo", credit="turn"))
    found = Selection.of(data, settings("ppo")).scored
    with pytest.raises(ValueError, match="bi_level_gae needs turns"):
        ppo.token_advantages(found, found.mask, found.mask_NT[:, 0], CriticSettings(optimizer=SLOW, bi_level_gae=True))
    with pytest.raises(ValueError, match="the rollouts have no turns"):
        candidates(settings("gigpo", tied_groups="drop"), rollouts, scores)

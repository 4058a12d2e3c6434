"""The policy's step compiles in a thread, beside the passes that come before it, and once."""

import dataclasses
import threading

import numpy as np
import pytest

from rlhf.tuning.algorithms.learner import Learner
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.rounds import run_round
from rlhf.tuning.algorithms.settings import CriticSettings
from rlhf.tuning.models.huggingface import scalar_head_params
from rlhf.tuning.models.lora import Base, LoraConfig, tune, tuned_graph
from rlhf.tuning.precision import using
from rlhf.tuning.settings import ComputeSettings, OptimizerSettings
from rlhf.tuning.training.step import copy
from tests.tuning.algorithms.support import rollouts, settings
from tests.tuning.tiny import CONFIG, PARAMS


@pytest.mark.parametrize(
    "name, changes, lora",
    [
        ("grpo", {}, False),
        ("grpo", {}, True),
        ("grpo", {"old_logps": "sampler"}, False),
        ("ppo", {"kl_in_reward": 0.05}, False),
        ("grpo", {"compute": ComputeSettings(dtype="float64")}, False),
    ],
    ids=["all parameters", "an adapter", "old ones of the sampler", "a critic", "float64"],
)
def test_it_compiles_ahead_and_not_again(compiled, name, changes, lora):
    rows, scores = rollouts(PARAMS, 0)
    # Of no other test: a step that was compiled before is not compiled here.
    optimizer = OptimizerSettings(learning_rate=0.0123)
    critic_settings = {"critic": CriticSettings(OptimizerSettings(learning_rate=0.0124))} if name == "ppo" else {}
    config = settings(name, optimizer=optimizer, prompts_per_step=6, **critic_settings, **changes)
    with using(config.compute.dtype):
        params, base, critic = copy(PARAMS), None, None
        if lora:
            adapter = LoraConfig(rank=2, alpha=4.0)
            params, frozen = tune(CONFIG, "decoder", PARAMS, adapter, seed=0, dtype="float32")
            base = Base(tuned_graph(CONFIG, "decoder", adapter), frozen)
        if config.needs_critic:
            critic = Learner.start(scalar_head_params(CONFIG, copy(PARAMS)), config.critic.optimizer)
        policy = Learner.start(params, config.optimizer, base)
        metrics = run_round(
            RoundData.from_rows(rows, scores), config, CONFIG, policy, critic, reference=copy(PARAMS)
        ).metrics
    assert metrics["steps"] == 1 and np.isfinite(metrics["loss"])
    # The critic's own step is compiled where it is called.
    assert compiled("single") == ["compile"] + [threading.current_thread().name] * (critic is not None)


def test_a_policy_that_has_nothing_to_follow_compiles_no_step(compiled):
    rows, scores = rollouts(PARAMS, 0)
    data = RoundData.from_rows(rows, [dataclasses.replace(score, total=1.0) for score in scores])
    critic = CriticSettings(OptimizerSettings(learning_rate=0.0124))
    optimizer = OptimizerSettings(learning_rate=0.0122)
    config = settings("ppo", optimizer=optimizer, critic=critic, kl_in_reward=0.0, prompts_per_step=6)
    policy = Learner.start(copy(PARAMS), optimizer)
    judge = Learner.start(scalar_head_params(CONFIG, copy(PARAMS)), critic.optimizer)
    assert run_round(data, config, CONFIG, policy, judge).metrics["value_loss"] > 0
    assert "compile" not in compiled("single")

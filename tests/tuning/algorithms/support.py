"""Rounds of RL of the tiny model with its own rollouts; even tokens are rewarded."""

import numpy as np

from rlhf.tuning.algorithms.learner import Learner
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.rounds import run_round
from rlhf.tuning.algorithms.settings import RoundSettings
from rlhf.tuning.models.huggingface import scalar_head_params
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.requests import Sampling
from rlhf.tuning.rows import CompletionRow, ScoreRow
from rlhf.tuning.settings import OptimizerSettings
from rlhf.tuning.training.step import copy
from tests.tuning.tiny import CONFIG, PARAMS

PROMPTS = [np.random.default_rng(i).integers(0, 97, 4 + i).tolist() for i in range(6)]


def rows_of(prompts, found):
    """Rows of what an engine has generated for each prompt."""
    return [
        CompletionRow(
            place=p, prompt_id=str(p), sample=s, prompt_ids=prompt, token_ids=c.tokens, logprobs=c.logps, stop=c.stop
        )
        for p, (prompt, completions) in enumerate(zip(prompts, found, strict=True))
        for s, c in enumerate(completions)
    ]


def scores_of(rows, totals):
    """Their scores."""
    return [
        ScoreRow(place=r.place, sample=r.sample, prompt_id=r.prompt_id, total=t)
        for r, t in zip(rows, totals, strict=True)
    ]


def rollouts(params, seed):
    """Eight completions of each prompt, and their scores: the share of even tokens."""
    found = Engine(CONFIG).generate(
        params, PROMPTS, samples=8, max_tokens=6, sampling=Sampling(), eos_ids=(1,), seed=seed,
        counters=range(6),
    )  # fmt: skip
    rows = rows_of(PROMPTS, found)
    return rows, scores_of(rows, [sum(t % 2 == 0 for t in r.token_ids) / len(r.token_ids) for r in rows])


def learners(config):
    """The policy at its start, and the critic where the settings need one."""
    critic = None
    if config.needs_critic:
        critic = Learner.start(scalar_head_params(CONFIG, copy(PARAMS)), config.critic.optimizer)
    return Learner.start(copy(PARAMS), config.optimizer), critic


def trained(config, data, **options):
    """A round from that start."""
    return run_round(data, config, CONFIG, *learners(config), **options)


def play(config, rounds, reference=None):
    """Trains through several rounds: (mean reward before each, metrics of each)."""
    (policy, critic), rewards, metrics = learners(config), [], []
    for r in range(rounds):
        rows, scores = rollouts(policy.params, r)
        rewards.append(np.mean([s.total for s in scores]))
        result = run_round(RoundData.from_rows(rows, scores), config, CONFIG, policy, critic, reference=reference)
        policy, critic = result.policy, result.critic
        metrics.append(result.metrics)
    return rewards, metrics


def settings(algorithm="grpo", **changes):
    base = {"prompts_per_step": 3, "kl_coef": 0.0, "optimizer": OptimizerSettings(learning_rate=0.003)}
    return RoundSettings.of(algorithm, **base | changes)

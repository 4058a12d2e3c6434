"""Steps of RL: W3 (GRPO, 4 prompts of 16 to 64 tokens x 4 completions of 64, beta 0.04) and W5 (PPO, 16 prompts).

A step samples, computes the reference's log-probabilities and the reward, and updates; the line of results times each
phase. Every completion has 64 tokens. The reward is the number of distinct tokens.
"""

import statistics
import time
from collections import defaultdict
from typing import Any

import numpy as np

from rlhf.tuning.algorithms.learner import Learner
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.rounds import run_round
from rlhf.tuning.algorithms.settings import CriticSettings, RoundSettings
from rlhf.tuning.device import choose
from rlhf.tuning.models.huggingface import random_params, scalar_head_params
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.requests import Sampling
from rlhf.tuning.settings import ComputeSettings, OptimizerSettings
from rlhf.tuning.training.batch import Group
from rlhf.tuning.training.speed import forward_flops
from rlhf.tuning.training.step import copy
from tests.bench import inputs
from tests.bench.measure import emit, gemm_flops, peak_memory_mb, timed
from tests.bench.training import config_of
from tests.tuning.algorithms.support import rows_of, scores_of

NEW_TOKENS = 64


def settings_of(work: str, dtype: str = "auto") -> RoundSettings:
    """As the peers are measured: one epoch, one step, AdamW at 1e-6."""
    optimizer = OptimizerSettings(learning_rate=1e-6)
    values: dict[str, Any] = {"prompts_per_step": 16, "optimizer": optimizer}
    values["compute"] = ComputeSettings(dtype=dtype)
    if work == "W5":
        return RoundSettings.of("ppo", kl_in_reward=0.04, critic=CriticSettings(optimizer=optimizer), **values)
    return RoundSettings.of("grpo", kl_coef=0.04, aggregation="sequence-mean-token-mean", **values)


class Steps:
    """A policy, and the engine, reference and critic that a step of RL needs."""

    def __init__(self, work: str, model: str, dtype: str = "auto"):
        """dtype: of activations; `auto`: the device's."""
        self.settings, self.config = settings_of(work, dtype), config_of(model)
        self.dtype = choose(dtype).compute.dtype
        self.count, self.samples = (16, 1) if work == "W5" else (4, 4)
        self.prompts = inputs.prompts(self.count, 16, 64, self.config.vocab_size)
        self.reference = random_params(self.config, 0)
        self.learner, self.critic = Learner.start(copy(self.reference), self.settings.optimizer), None
        if work == "W5":
            critic = scalar_head_params(self.config, random_params(self.config, 1))
            self.critic = Learner.start(critic, self.settings.critic.optimizer)
        self.phases: dict[str, list[float]] = defaultdict(list)
        self.number = 0

    def step(self) -> Any:
        started = time.perf_counter()
        # In a run the engine and its copy of the weights end with the rollout stage.
        found = Engine(self.config, self.dtype).generate(
            self.learner.params, self.prompts, samples=self.samples, max_tokens=NEW_TOKENS, sampling=Sampling(),
            eos_ids=(), seed=self.number, counters=range(self.count),
        )  # fmt: skip
        self.phases["rollout"].append(time.perf_counter() - started)
        rows = rows_of(self.prompts, found)
        assert all(len(r.token_ids) == NEW_TOKENS for r in rows)
        # Groups of equal rewards would leave the step; a thousandth of the place tells them apart.
        totals = [len(set(r.token_ids)) + 1e-3 * i for i, r in enumerate(rows)]
        data = RoundData.from_rows(rows, scores_of(rows, totals))
        metrics = run_round(
            data, self.settings, self.config, self.learner, self.critic, reference=self.reference
        ).metrics
        assert metrics["steps"] == 1 and np.isfinite(metrics["loss"])
        for name in ("old", "reference", "values", "compile", "train"):
            if f"seconds_{name}" in metrics:
                self.phases[name].append(metrics[f"seconds_{name}"])
        self.number += 1
        return self.learner.params


def run(work: str, model: str, repeats: int, dtype: str = "auto") -> None:
    steps = Steps(work, model, dtype)
    found = timed(steps.step, repeats)
    tokens = steps.count * steps.samples * NEW_TOKENS
    groups = [Group(p, [[0] * NEW_TOKENS] * steps.samples, list(range(steps.samples))) for p in steps.prompts]
    flops = {"W3": 4, "W5": 9}[work] * forward_flops(steps.config, groups)
    gemm = gemm_flops(steps.config.hidden_size, steps.config.intermediate_size, dtype)
    emit(
        work,
        model,
        **found,
        dtype=dtype,
        phases_first_s={k: round(v[0], 3) for k, v in steps.phases.items()},
        phases_s={k: round(statistics.median(v[1:]), 4) for k, v in steps.phases.items() if len(v) > 1},
        tokens=tokens,
        tokens_per_s=round(tokens / found["median_s"], 1),
        peak_memory_mb=round(peak_memory_mb()),
        gflop_without_decoding=round(flops / 1e9),
        gemm_gflops=round(gemm / 1e9),
    )

"""Reinforcement learning by GRPO in one file: sample, reward, update, evaluate.

Objective: the share of token 3 in what the policy says, which starts at 1 in 64. GRPO compares each completion with the
others of its prompt, and raises the probability of those with more of the token.

Simplifications: the model is random and tiny, prompts are random token ids, there is no tokenizer and no KL to a
reference, everything is in memory. A real run reads a model by `rlhf.tuning.models.huggingface.load_decoder(folder)`,
and the stages of this repository store what each round makes.

    python examples/rl_loop.py

takes about a minute on two CPU cores, and the share goes from 0.01 to 0.67.
"""

from __future__ import annotations

import numpy as np

from rlhf.tuning.algorithms.learner import Learner
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.rounds import run_round
from rlhf.tuning.algorithms.settings import RoundSettings
from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.requests import Completion, Sampling
from rlhf.tuning.settings import OptimizerSettings

VOCABULARY, EOS, WANTED = 64, 1, 3
ROUNDS, PROMPTS, COMPLETIONS, MAX_TOKENS = 12, 16, 8, 12

MODEL = tiny(VOCABULARY)
OPTIMIZER = OptimizerSettings(learning_rate=0.003)
SETTINGS = RoundSettings.of("grpo", prompts_per_step=8, kl_coef=0.0, optimizer=OPTIMIZER)


def reward(completion: Completion) -> float:
    """The share of the wanted token."""
    return completion.tokens.count(WANTED) / len(completion.tokens)


def sample(
    engine: Engine, policy: Learner, prompts: list[list[int]], samples: int, seed: int
) -> list[list[Completion]]:
    """`samples` completions of each prompt."""
    return engine.generate(
        policy.params,
        prompts,
        samples=samples,
        max_tokens=MAX_TOKENS,
        sampling=Sampling(),
        eos_ids=[EOS],
        seed=seed,
        counters=range(len(prompts)),
    )


def scored(prompts: list[list[int]], groups: list[list[Completion]]) -> RoundData:
    """The completions of a round with their rewards: one entry a completion, those of a prompt side by side."""
    rows = [(number, completion) for number, group in enumerate(groups) for completion in group]
    return RoundData(
        prompts=[prompts[number] for number, _ in rows],
        completions=[completion.tokens for _, completion in rows],
        mu=[completion.logps for _, completion in rows],
        groups_N=np.asarray([number for number, _ in rows]),
        totals_N=np.asarray([reward(completion) for _, completion in rows], np.float32),
        valid_N=np.ones(len(rows), bool),
        truncated_N=np.asarray([completion.stop == "length" for _, completion in rows]),
    )


def main(rounds: int = ROUNDS, seed: int = 0) -> list[float]:
    """Trains for some rounds; the mean reward on held-out prompts before the first and after the last."""
    rng = np.random.default_rng(seed)
    heldout, *batches = rng.integers(4, VOCABULARY, (rounds + 1, PROMPTS, 6)).tolist()
    engine = Engine(MODEL)
    policy = Learner.start(random_params(MODEL, seed), SETTINGS.optimizer)

    def evaluate() -> float:
        return float(scored(heldout, sample(engine, policy, heldout, 4, seed=1000)).totals_N.mean())

    rewards = [evaluate()]
    for number, prompts in enumerate(batches):
        data = scored(prompts, sample(engine, policy, prompts, COMPLETIONS, seed=number))
        result = run_round(data, SETTINGS, MODEL, policy)
        policy = result.policy
        metrics = {name: round(result.metrics.get(name, 0.0), 4) for name in ("kept", "mismatch_kl", "entropy")}
        print(f"round {number:2}  reward {data.totals_N.mean():.3f}  {metrics}")
    rewards.append(evaluate())
    print(f"held-out reward {rewards[0]:.3f} -> {rewards[1]:.3f}")
    return rewards


if __name__ == "__main__":
    main()

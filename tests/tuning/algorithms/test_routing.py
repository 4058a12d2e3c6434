"""Rounds of a mixture of experts: trained on the experts that sampled (R28)."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from rlhf.tuning.algorithms.learner import Learner
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.rounds import run_round
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.models.identity import fingerprint
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.requests import Request
from rlhf.tuning.training.step import copy
from tests.tuning.algorithms.support import PROMPTS, rows_of, scores_of, settings
from tests.tuning.models.mixtures import MIXTURE

pytestmark = pytest.mark.slow

PARAMS = jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, random_params(MIXTURE, 3))
EXPERTS = MIXTURE.num_layers, MIXTURE.experts_per_token


@functools.cache
def rollouts():
    """Eight completions of each prompt with their experts; even tokens are rewarded."""
    engine = Engine(MIXTURE)
    engine.load(PARAMS)
    wanted = [
        Request(prompt, 6, stop_ids=(1,), seed=1, counter=i, samples=8, routing=True)
        for i, prompt in enumerate(PROMPTS)
    ]
    done = dict(engine.run(wanted))
    found = [done[i] for i in range(len(PROMPTS))]
    routing = [c.routing for completions in found for c in completions]
    rows = [dataclasses.replace(row, routing=r) for row, r in zip(rows_of(PROMPTS, found), routing, strict=True)]
    return rows, scores_of(rows, [sum(t % 2 == 0 for t in r.token_ids) / len(r.token_ids) for r in rows])


def trained(replay=True, rows=None, **changes):
    given, scores = rollouts()
    data = RoundData.from_rows(rows or given, scores, replayed=MIXTURE if replay else None)
    config = settings(**changes)
    policy = Learner.start(copy(PARAMS), config.optimizer)
    return run_round(data, config, MIXTURE, policy, reference=PARAMS if config.needs_reference else None)


def noisy(share=0.1):
    """The rollouts of an engine whose routers disagree with the trainer's: some experts are the next ones."""
    rng = np.random.default_rng(0)
    rows = []
    for row in rollouts()[0]:
        experts = np.frombuffer(row.routing, np.uint8).reshape(-1, *EXPERTS).copy()
        changed = rng.random(experts.shape[:2]) < share
        experts[changed] = (experts[changed] + 1) % MIXTURE.num_experts
        rows.append(dataclasses.replace(row, routing=experts.tobytes()))
    return rows


def test_with_a_replay_the_mismatch_is_rounding_and_a_round_comes_again_to_the_bit():
    first, again = (trained(kl_coef=0.1, prompts_per_step=6) for _ in range(2))
    assert first.metrics["mismatch_kl"] < 1e-9
    assert first.metrics["router_disagreement"] < 0.02
    assert 1 / 3 < first.metrics["busiest_expert"] <= 1 and first.metrics["router_entropy"] > 0
    assert fingerprint(first.policy.params) == fingerprint(again.policy.params) != fingerprint(PARAMS)


def test_other_experts_than_those_that_sampled_are_a_mismatch():
    other = trained(rows=noisy(), max_mismatch_kl=10.0, prompts_per_step=6)
    assert other.metrics["mismatch_kl"] > 1e-3
    assert 0.02 < other.metrics["router_disagreement"] < 0.2
    # Without a replay the record is not read.
    free, plain = trained(replay=False, rows=noisy()), trained(replay=False)
    assert fingerprint(free.policy.params) == fingerprint(plain.policy.params)


def test_the_balance_loss_spreads_tokens():
    moved = trained(router_aux=30.0, epochs=12).metrics["busiest_expert"]
    assert moved < trained(epochs=12).metrics["busiest_expert"]
    with pytest.raises(ValueError, match="router_aux is for a mixture"):
        from tests.tuning.algorithms.support import rollouts
        from tests.tuning.algorithms.support import trained as dense

        dense(settings(router_aux=0.1), RoundData.from_rows(*rollouts(copy_of_dense(), 0)))


def copy_of_dense():
    from tests.tuning.tiny import PARAMS

    return copy(PARAMS)


def test_a_rollout_without_a_record_is_refused():
    rows, scores = rollouts()
    for routing in (None, rows[0].routing[:-1], bytes([99]) * len(rows[0].routing)):
        bad = [dataclasses.replace(rows[0], routing=routing), *rows[1:]]
        with pytest.raises(ValueError, match=r"place 0, sample 0 .*rl.update.routing: free"):
            RoundData.from_rows(bad, scores, replayed=MIXTURE)

"""Completions whose tokens come from several policies: each token is weighed by the policy that sampled it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from stages.update import stage as update
from tests.oracle.plain import model
from tests.oracle.product import Product
from tests.oracle.rounds import COMMON, checked, update_tables
from tests.oracle.tables import Drawn, round_of
from tuning.rows import CompletionRow, ScoreRow

DRAWN = [
    *(Drawn(0, 0, i, 4 + i, t) for i, t in enumerate((0.0, 1.0, 0.3))),
    *(Drawn(1, 1, i, 6 - i, t) for i, t in enumerate((1.0, 0.4, 0.2))),
]
CUT = 2
"""Tokens of each completion that the first of its policies has sampled."""


def sampled_by_two(product: Product) -> tuple[list[CompletionRow], list[ScoreRow]]:
    """A round whose completions began under the policy `other` and went on under the base, which is updated."""
    rows, scores = round_of(DRAWN, product.base.digest, 3)
    first, second = (model.load(policy.local("model/")) for policy in (product.other, product.base))

    def logps(row: CompletionRow) -> list[float]:
        prompt, tokens = list(row.prompt_ids), list(row.token_ids)
        begun, went_on = (of.logps(prompt, tokens, COMMON["temperature"])[0].tolist() for of in (first, second))
        return [*begun[:CUT], *went_on[CUT:]]

    with torch.no_grad():
        return [dataclasses.replace(row, logprobs=logps(row)) for row in rows], scores


SLOW = [{"epochs": 2}, {"correction": "mask", "importance_min": 0.5}]


@pytest.mark.parametrize("more", [{}, *(pytest.param(more, marks=pytest.mark.slow) for more in SLOW)])
def test_an_update_weighs_each_token_by_the_policy_that_sampled_it(more: dict[str, Any], product: Product) -> None:
    rows, scores = sampled_by_two(product)
    config = {"algorithm": "grpo"} | more
    made, now = update_tables(product, config, rows, scores, ())
    checked(f"two policies, {more}", made, now)
    # Were all tokens taken for the newest policy's, whose weights are 1, it would arrive elsewhere.
    base = model.load(product.base.local("model/"))
    with torch.no_grad():
        alone = [
            dataclasses.replace(
                row, logprobs=base.logps(list(row.prompt_ids), list(row.token_ids), COMMON["temperature"])[0].tolist()
            )
            for row in rows
        ]
    other, _ = update_tables(product, config, alone, scores, ())
    mine, theirs = (model.weights_of(one.local("state/model/")) for one in (made, other))
    assert max(float((mine[n] - theirs[n]).abs().max()) for n in mine) > 1e-4


def test_the_weights_are_by_hand_those_of_each_token(product: Product) -> None:
    """In one step the policy is that which is updated: log pi_old of tokens that an older one sampled is its own."""
    rows, scores = sampled_by_two(product)
    inputs = {"rollouts": product.rollouts(rows), "scores": product.scores(scores)}
    shared = {"policy": product.base, "reference": product.other, "tokenizer": product.base}
    _, metrics, _ = product.run(update, COMMON | {"algorithm": "grpo"}, inputs | shared)
    now = model.load(product.base.local("model/"))
    with torch.no_grad():
        old = [now.logps(list(r.prompt_ids), list(r.token_ids), COMMON["temperature"])[0].numpy() for r in rows]
    # The table has float32.
    log_rho = [o - np.asarray(np.float32(r.logprobs), np.float64) for o, r in zip(old, rows, strict=True)]
    assert max(np.abs(x[CUT:]).max() for x in log_rho) < 1e-6 < min(np.abs(x[:CUT]).max() for x in log_rho)
    rho = np.exp(np.concatenate(log_rho))
    kish = rho.sum() ** 2 / (rho**2).sum() / len(rho)
    k3 = (rho - 1 - np.log(rho)).mean()
    assert metrics["mismatch_kl"] == pytest.approx(k3, rel=1e-6)
    assert metrics["effective_sample_size"] == pytest.approx(kish, rel=1e-6)


def test_one_group_more_than_a_step_has_is_no_step_more(product: Product) -> None:
    """Rounds whose groups are those that became whole, not those that were drawn."""
    drawn = [*DRAWN, *(Drawn(p, p, i, 3 + i, float(i)) for p in (2, 3) for i in range(3))]
    rows, scores = round_of(drawn, product.base.digest, 3)
    shared = {"policy": product.base, "reference": product.other, "tokenizer": product.base}
    for stage, steps in (("rollout", 2), ("partial", 1)):
        inputs = {"rollouts": product.rollouts(rows, stage=stage), "scores": product.scores(scores)} | shared
        _, metrics, _ = product.run(update, COMMON | {"algorithm": "grpo", "prompts_per_step": 3}, inputs)
        assert metrics["steps"] == steps

"""log pi_old by the sampler: the rounds that a pass of the trainer gives, and a gap that is told and limited."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from rlhf.tuning.algorithms import rounds
from rlhf.tuning.algorithms.learner import Learner
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.rounds import Mismatch, Tally, check_step, run_round
from rlhf.tuning.losses.importance import RATIO_EDGES
from rlhf.tuning.training.step import copy
from tests.tuning.algorithms import support
from tests.tuning.algorithms.support import rollouts, settings
from tests.tuning.tiny import CONFIG, PARAMS

pytestmark = pytest.mark.slow


# Not at import: every process of the tests imports every module.
@functools.cache
def sampled():
    return rollouts(PARAMS, 0)


def shifted(by, rows=None):
    """Rollouts whose sampler says other log-probabilities than the trainer."""
    rows = rows or sampled()[0]
    return [dataclasses.replace(r, logprobs=[x + by for x in r.logprobs]) for r in rows]


def trained(config, rows=None, **options):
    sampled_rows, scores = sampled()
    return support.trained(config, RoundData.from_rows(rows or sampled_rows, scores), **options)


def passes_of(monkeypatch):
    """The names of the forward passes that rounds make, as they make them."""
    names, forward = [], rounds._Round.forward
    monkeypatch.setattr(
        rounds._Round,
        "forward",
        lambda self, program, weights, name, *rest: names.append(name) or forward(self, program, weights, name, *rest),
    )
    return names


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("grpo", {"epochs": 2, "kl_coef": 0.05}),
        pytest.param("ppo", {"kl_in_reward": 0.0}, id="critic"),
        pytest.param("gspo", {"prompts_per_step": 6}, id="one step"),
    ],
)
def test_where_sampler_and_trainer_agree_a_round_is_the_same_without_the_pass(algorithm, options, monkeypatch):
    names = passes_of(monkeypatch)
    by_trainer, by_sampler = (
        trained(settings(algorithm, old_logps=kind, **options), reference=PARAMS) for kind in ("trainer", "sampler")
    )
    assert names.count("old") == (algorithm != "gspo")
    for a, b in zip(jax.tree.leaves(by_trainer.policy.params), jax.tree.leaves(by_sampler.policy.params), strict=True):
        # Of steps of 0.003: Adam makes a rounding of a gradient near 0 larger.
        np.testing.assert_allclose(a, b, atol=1e-4)
    for name in ("loss", "approx_kl", "grad_norm", "trained_tokens", "kept"):
        assert by_sampler.metrics[name] == pytest.approx(by_trainer.metrics[name], abs=2e-5, rel=1e-4), name
    assert 0 <= by_sampler.metrics["mismatch_kl"] < 1e-9
    assert by_sampler.metrics["effective_sample_size"] == pytest.approx(1, abs=1e-5)


def test_the_first_step_tells_the_gap_of_its_tokens_and_later_ones_none():
    steps = []
    config = settings(old_logps="sampler", epochs=2, max_mismatch_kl=1.0)
    metrics = trained(config, shifted(-0.25), record=lambda **v: steps.append(v)).metrics
    # k3 of a trainer that gives each token 0.25 more than the sampler.
    assert metrics["mismatch_kl"] == pytest.approx(np.expm1(0.25) - 0.25, rel=1e-4)
    assert metrics["ratio_p50"] == pytest.approx(np.exp(0.25), rel=0.05)
    assert len(steps) == 4 and steps[0]["mismatch_kl"] == pytest.approx(metrics["mismatch_kl"])
    assert all("drift_kl" in step and "mismatch_kl" not in step and "ratio_p50" not in step for step in steps[1:])
    assert metrics["trained_tokens"] == 2 * sum(len(r.token_ids) for r in sampled()[0])


@pytest.mark.parametrize(
    "by", [-1.0, np.nan], ids=["a sampler that disagrees", "log-probabilities that are no numbers"]
)
@pytest.mark.parametrize("options", [{}, {"prompts_per_step": 6}], ids=["steps", "one step"])
def test_a_gap_past_the_limit_ends_the_round(by, options):
    nowhere = jax.tree.map(lambda x: np.nan * x, PARAMS)
    start = Learner.start(copy(nowhere if np.isnan(by) else PARAMS), settings().optimizer)
    rows, scores = sampled()
    rows = rows if np.isnan(by) else shifted(by)
    config = settings(old_logps="sampler", **options)
    with pytest.raises(Mismatch, match=r"is above max_mismatch_kl 0.1"):
        run_round(RoundData.from_rows(rows, scores), config, CONFIG, start)


def test_a_gap_of_later_steps_ends_the_round_too():
    """Of a worker with other weights, say, whose rollouts come last."""
    rows, _ = sampled()
    rows = [*(r for r in rows if r.place < 3), *shifted(-2.0, [r for r in rows if r.place >= 3])]
    made = []
    with pytest.raises(Mismatch, match=r"above 10 times max_mismatch_kl 0.1"):
        trained(settings(old_logps="sampler"), rows, record=lambda **v: made.append(v))
    assert len(made) == 1 and made[0]["mismatch_kl"] < 1e-9


def test_a_policy_that_moves_within_a_round_is_no_gap():
    """By more than the limit of a mismatch in one step, as one with little entropy does."""
    rows, _ = sampled()
    rows = [*(r for r in rows if r.place < 3), *shifted(-0.6, [r for r in rows if r.place >= 3])]
    made = []
    trained(settings(old_logps="sampler"), rows, record=lambda **v: made.append(v))
    assert len(made) == 2 and 0.1 < made[1]["drift_kl"] < 1


def test_drift_that_is_no_number_ends_the_round():
    with pytest.raises(Mismatch, match="drift KL nan"):
        check_step({"drift_kl": np.nan}, 0.1)


def test_the_first_step_that_is_not_skipped_tells_the_gap():
    def step(skipped, k3):
        sums = dict.fromkeys(("n_tokens", "old_n_tokens", "old_weight", "old_weight_sq"), 10.0)
        sums |= {f"ratio_bin_{i:02d}": 0.0 for i in range(len(RATIO_EDGES) + 1)}
        sums |= {"old_mismatch_k3": 10 * k3, "loss": 0, "approx_kl": 0, "entropy": 0}
        return sums | {"grad_norm": np.nan if skipped else 1.0, "skipped": float(skipped)}

    tally = Tally(by_sampler=True)
    made = [tally.add(step(*of)) for of in ((True, 0.5), (False, 0.25), (True, 1.0), (False, 2.0))]
    found = [(s.get("mismatch_kl"), s.get("drift_kl")) for s in made]
    assert found == [(0.5, None), (0.25, None), (None, 1), (None, 2)]
    metrics = tally.metrics()
    assert (metrics["mismatch_kl"], metrics["steps"], metrics["trained_tokens"]) == (0.25, 4, 20)
    assert metrics["drift_kl"] == 2
    by_trainer = Tally()
    for skipped, k3 in ((True, 0.5), (False, 0.25), (False, 0.75)):
        by_trainer.add(step(skipped, k3))
    assert by_trainer.metrics()["mismatch_kl"] == 0.5

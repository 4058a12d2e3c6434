"""Presets against their authors' code: the weight of a token in the loss, trust regions, and the entropy bonus."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.algorithms import rounds
from rlhf.tuning.algorithms.algorithm import Terms, find
from rlhf.tuning.algorithms.diagnostics import Coefficients
from rlhf.tuning.algorithms.flat import Column
from rlhf.tuning.algorithms.learner import Learner
from rlhf.tuning.algorithms.registry import presets
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.rounds import run_round
from rlhf.tuning.algorithms.selection import Selection
from rlhf.tuning.algorithms.settings import RoundSettings
from rlhf.tuning.losses.aggregate import aggregate
from rlhf.tuning.settings import OptimizerSettings
from rlhf.tuning.training.batch import Group, choose_rows, micro_batches
from rlhf.tuning.training.step import copy, counted
from tests.tuning.algorithms.support import rollouts, settings
from tests.tuning.tiny import CONFIG, PARAMS

P, G, STEP, MOST = 6, 4, 2, 10
GROUPS = np.repeat(np.arange(P), G)
# Groups 1 and 4 have rewards that differ; steps are of groups 0 and 1, 2 and 3, 4 and 5.
REWARDS = np.zeros((P, G), np.float32)
REWARDS[1, 0] = REWARDS[4, 1] = REWARDS[4, 3] = 1
REWARDS[5] = 1
LENGTHS = np.random.default_rng(0).integers(1, MOST, P * G)


def of_preset(name, **more):
    constant = {"constant": float(MOST)} if presets(name).get("aggregation") == "constant" else {}
    return RoundSettings.of(name, prompts_per_step=STEP, **constant | more)


def weights(config, rewards=REWARDS):
    """The factor of d log pi of each token of a completion in the loss of its step, at the policy that sampled, [N]."""
    completions = [np.full(n, 7) for n in LENGTHS]
    mu = [np.full(n, -1.0) for n in LENGTHS]
    no = np.zeros(P * G, bool)
    data = RoundData([[int(g)] for g in GROUPS], completions, mu, GROUPS, rewards.reshape(-1), ~no, no)
    chosen = Selection.of(data, config)
    division = chosen.divided(chosen.trained())
    layout = choose_rows(division.groups, 512)
    advantages, found = np.asarray(chosen.algorithm.advantages(chosen.scored)), np.zeros(P * G)
    for groups, unpacked in zip(division.groups, division.unpacked, strict=True):
        packed = micro_batches(groups, layout=layout, completion_tokens=MOST)
        for batch, arrays in zip(packed, counted(groups, packed, unpacked), strict=True):
            mask = jnp.asarray(batch.mask_CT)
            counts = {"n_tokens": arrays["n_tokens"], "n_sequences": arrays["n_completions"]}
            reduce = functools.partial(
                aggregate, mask_BT=mask, mode=config.aggregation, constant=config.constant, **counts
            )
            of_tokens = jax.grad(reduce)(jnp.zeros(mask.shape))
            of_completion = np.asarray(of_tokens).max(-1) * batch.gather(advantages)
            found[batch.ids_C[batch.ids_C >= 0]] = of_completion[batch.ids_C >= 0]
    return found, division


def of_step(x):
    """Sums over the completions of each completion's step."""
    return np.repeat(np.asarray(x, float).reshape(P // STEP, -1).sum(-1), STEP * G)


CENTRED = (REWARDS - REWARDS.mean(-1, keepdims=True)).reshape(-1)
SCALED = CENTRED / (np.repeat(REWARDS.std(-1, ddof=1), G) + 1e-4)
ONES = np.ones(P * G)
BASELINE = (REWARDS * LENGTHS.reshape(P, G)).sum(-1) / LENGTHS.reshape(P, G).sum(-1)
AUTHORS = {
    # TRL f2cd577 grpo_trainer.py:3126, `grpo`: ((loss * mask).sum(-1) / mask.sum(-1)).mean().
    "grpo": SCALED / LENGTHS / of_step(ONES),
    "gspo": SCALED / LENGTHS / of_step(ONES),
    "sapo": SCALED / LENGTHS / of_step(ONES),
    "gmpo": SCALED / LENGTHS / of_step(ONES),
    # understand-r1-zero train_zero_math.py: masked_sum(..., constant_normalizer=generate_max_length), mean over rows.
    "dr-grpo": CENTRED / MOST / of_step(ONES),
    # Stable-RL run_qwen3_30b_a3b_megatron.sh: norm_adv_by_std_in_grpo False, seq-mean-token-sum-norm.
    "dppo": CENTRED / MOST / of_step(ONES),
    # TRL grpo_trainer.py:2427, `cispo`: num_items_in_batch is all tokens.
    "cispo": SCALED / of_step(LENGTHS),
    # verl docs/algo/opo.md leaves loss_agg_mode at token-mean.
    "opo": (REWARDS - BASELINE[:, None]).reshape(-1) / of_step(LENGTHS),
    # open-r1 gpg_trainer.py:543-554, 625, 316: `loss / inverse_alpha`, the share of groups whose rewards differ.
    "gpg": CENTRED / (2 / P) / of_step(LENGTHS),
    # DAPO samples until a round has informative groups alone: here the two make one step.
    "dapo": SCALED / LENGTHS[(GROUPS == 1) | (GROUPS == 4)].sum(),
}


@pytest.mark.parametrize("name", AUTHORS)
def test_a_token_weighs_what_it_weighs_in_the_authors_code(name):
    found, division = weights(of_preset(name, **{"kl_coef": 0.0} if name == "grpo" else {}))
    np.testing.assert_allclose(found, AUTHORS[name], rtol=1e-5, atol=1e-9)
    assert len(division.groups) == (1 if name == "dapo" else P // STEP)
    # Nothing is computed of a tied group, but for one completion of a step of ties.
    assert division.packed_N.sum() == 2 * G + (name != "dapo")


@pytest.mark.parametrize("ties", ["count", "drop"])
def test_gpg_does_not_depend_on_the_zero_of_the_rewards(ties):
    config = of_preset("gpg", tied_groups=ties)
    np.testing.assert_allclose(weights(config)[0], weights(config, REWARDS - 1)[0], rtol=1e-6)
    if ties == "drop":
        informative = (GROUPS == 1) | (GROUPS == 4)
        np.testing.assert_allclose(weights(config)[0], CENTRED / LENGTHS[informative].sum(), rtol=1e-5)


@pytest.mark.slow
def test_a_kl_without_a_weight_is_the_limit_of_one_with_little():
    """Also in a step of ties alone, where momentum moves the weights."""
    rows, scores = rollouts(PARAMS, 0)
    # Informative are places 0 and 1 of six; two places a step.
    scores = [s if s.place < 2 else dataclasses.replace(s, total=1.0) for s in scores]
    optimizer = OptimizerSettings(name="sgd", learning_rate=0.1, beta1=0.5)
    found = {}
    for kl_coef in (0.0, 1e-9):
        config = settings("dr-grpo", kl_coef=kl_coef, constant=6.0, prompts_per_step=2, optimizer=optimizer)
        policy = Learner.start(copy(PARAMS), optimizer)
        reference = PARAMS if kl_coef else None
        found[kl_coef] = run_round(RoundData.from_rows(rows, scores), config, CONFIG, policy, reference=reference)
    for name in ("steps", "trained_tokens", "kept", "loss", "grad_norm"):
        assert found[0.0].metrics[name] == pytest.approx(found[1e-9].metrics[name], rel=1e-4, abs=1e-6), name
    assert found[0.0].metrics["steps"] == 3 and found[0.0].metrics["row_tokens"] < found[1e-9].metrics["row_tokens"]
    assert (found[0.0].trained_N == found[1e-9].trained_N).all()
    moved = jax.tree.map(lambda after, before: float(jnp.abs(after - before).max()), found[0.0].policy.params, PARAMS)
    assert max(jax.tree.leaves(moved)) > 1e-3
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found[0.0].policy.params, found[1e-9].policy.params
    )


@pytest.mark.parametrize("name", ["dppo", "dppo-kl"])
def test_the_trust_region_of_dppo_is_around_the_sampler(name):
    """Stable-RL core_algos.py:1189-1277: ratio and region are of log_prob - rollout_log_prob."""
    config = of_preset(name)
    assert (config.old_logps, config.normalisation, config.aggregation) == ("sampler", "none", "constant")
    rng = np.random.default_rng(0)
    prob, rollout = rng.uniform(0.01, 0.99, (2, 4, 64))
    # A ratio above 10 keeps its weight.
    prob[0, 0], rollout[0, 0] = 0.04, 0.001
    advantages = np.asarray([1.0, -1.0, 0.5, -2.0])
    low, high = config.clip_low, config.clip_high
    if name == "dppo":
        up, down = prob - rollout > high, prob - rollout < -low
    else:
        kl = rollout * np.log(rollout / prob) + (1 - rollout) * np.log((1 - rollout) / (1 - prob))
        up, down = (kl > high) & (prob > rollout), (kl > low) & (prob < rollout)
    valid = ~np.where(advantages[:, None] > 0, up, down)

    def loss(logps):
        terms = Terms(logps, jnp.log(jnp.asarray(rollout)), jnp.asarray(advantages), jnp.ones((4, 64)))
        return find(config.objective).surrogate(terms)[0].sum()

    slope = jax.grad(loss)(jnp.log(jnp.asarray(prob)))
    np.testing.assert_allclose(slope, -advantages[:, None] * prob / rollout * valid, rtol=1e-4, atol=1e-6)
    assert 0 < valid.mean() < 1


def test_the_entropy_bonus_is_off_above_its_target():
    """Skywork-OR1: alpha_k = c_k 1[entropy <= target]; TRL grpo_trainer.py:3177."""
    config = of_preset("grpo", entropy_coef=0.005, entropy_target=0.2)
    now, found, kept = Coefficients.start(config.objective), [], []
    for entropy in (2.0, 2.0, 0.1, 0.2, 2.0):
        found.append(float(now.scalars()["entropy_coef"]))
        kept.append(now.entropy_coef)
        now = now.next(config, {"entropy": entropy})
    np.testing.assert_allclose(found, [0, 0, 0, 0.004, 0.003], atol=1e-8)
    np.testing.assert_allclose(kept, [0.005, 0.004, 0.003, 0.004, 0.003], atol=1e-8)
    assert Coefficients.start(of_preset("grpo", entropy_coef=0.005).objective).entropy_weight == 0.005


TOKENS = np.random.default_rng(1)
LOGPS = -TOKENS.gamma(2.0, 0.5, (4, 6))
OLD = LOGPS + TOKENS.normal(0, 0.4, (4, 6))
MASK = np.arange(6) < np.asarray([6, 4, 1, 5])[:, None]
A = np.asarray([1.5, -0.7, 0.2, -1.0])


def slope_of(name, marked=0.0):
    """Gradient of the summed surrogate to the log-probabilities."""

    def loss(logps):
        arrays = (OLD, np.broadcast_to(A[:, None], MASK.shape), MASK.astype(np.float32))
        terms = Terms(logps, *map(jnp.asarray, arrays), marked_CT=jnp.asarray(marked))
        return find(of_preset(name).objective).surrogate(terms)[0].sum()

    return np.asarray(jax.grad(loss)(jnp.asarray(LOGPS)))


def test_vespo_weighs_a_completion_as_trl_does():
    """TRL get_gamma_weights: phi = exp(lambda + k log w - lambda w), w the product of ratios, times A log pi."""
    assert of_preset("vespo").old_logps == "sampler"
    log_w = np.clip(((LOGPS - OLD) * MASK).sum(-1), np.log(1e-8), 20)
    k, rate = np.where(A >= 0, 2, 3), np.where(A >= 0, 3, 2)
    phi = np.exp(rate + k * log_w - rate * np.exp(log_w))
    np.testing.assert_allclose(slope_of("vespo"), -(phi * A)[:, None] * MASK, rtol=1e-4, atol=1e-7)


def test_kl_cov_and_clip_cov_are_the_authors():
    """PRIME-RL/Entropy-Mechanism-of-RL core_algos.py: compute_policy_loss_kl_cov, compute_policy_loss_clip_cov."""
    advantages, logps = np.repeat(A, 500), np.tile(LOGPS.reshape(-1), 84)[:2000]
    cov = (advantages - advantages.mean()) * (logps - logps.mean())
    held = find(of_preset("kl-cov").objective).mark(advantages, logps)
    # k_percent 0.2: the top 0.2 % of the tokens.
    assert held.sum() == 4 and cov[held].min() >= np.sort(cov)[-4]
    cut = find(of_preset("clip-cov").objective).mark(advantages, logps)
    # clip_ratio 0.0002, at least one, of those with a covariance from 1 to 5.
    assert cut.sum() == 1 and ((cov[cut] > 1) & (cov[cut] < 5)).all()
    assert not find(of_preset("clip-cov").objective).mark(advantages * 1e-3, logps).any()
    ratio, marked = np.exp(LOGPS - OLD), np.zeros(MASK.shape)
    marked[0, 1] = marked[3, 2] = 1
    plain = -A[:, None] * ratio * MASK
    np.testing.assert_allclose(slope_of("kl-cov", marked), plain + np.sign(LOGPS - OLD) * marked, rtol=1e-4, atol=1e-6)
    inside = np.where(A[:, None] > 0, ratio < 1.2, ratio > 0.8)
    np.testing.assert_allclose(slope_of("clip-cov", marked), plain * inside * (1 - marked), rtol=1e-4, atol=1e-6)


def test_the_tokens_of_highest_entropy_are_those_of_the_whole_step():
    """TRL get_high_entropy_mask: entropy >= quantile(all tokens, 1 - share); no micro-batch decides."""
    entropy = Column.of(np.random.default_rng(2).random((4, 6)))
    steps = [[Group([1], [[2] * 6] * 2, [0, 3])], [Group([1], [[2] * 6] * 2, [1, 2])]]
    found = rounds.marked(rounds.highest(0.2), [entropy], Column.of(MASK), steps).dense()
    for ids in ([0, 3], [1, 2]):
        of_step = entropy.dense()[ids][MASK[ids]]
        wanted = (entropy.dense()[ids] >= np.quantile(of_step, 0.8)) & MASK[ids]
        np.testing.assert_array_equal(found[ids], wanted)

"""Every algorithm by its name: it teaches a table of logits. Corrections, KL, coefficients and PPO's advantages."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.algorithms import ppo, registry
from rlhf.tuning.algorithms.algorithm import Algorithm, Scored, Terms, find, group_relative, informative
from rlhf.tuning.algorithms.diagnostics import Coefficients, mismatch_means
from rlhf.tuning.algorithms.flat import Column
from rlhf.tuning.algorithms.objective import correction_weights, kl_loss
from rlhf.tuning.algorithms.registry import ALGORITHMS
from rlhf.tuning.algorithms.settings import CriticSettings, Objective, RoundSettings
from rlhf.tuning.algorithms.turns import Turns
from rlhf.tuning.losses.aggregate import aggregate
from rlhf.tuning.losses.importance import log_ratio_bins

P, G, T, V = 6, 8, 3, 5
GROUPS = np.repeat(np.arange(P), G)
MASK = jnp.ones((P * G, T), jnp.float32)


def settings(algorithm, **more):
    more |= {"constant": 3.0} if registry.presets(algorithm).get("aggregation") == "constant" else {}
    return RoundSettings.of(algorithm, **more)


def logps_of(table_PTV, tokens_CT):
    logps = jax.nn.log_softmax(table_PTV)[GROUPS]
    return jnp.take_along_axis(logps, tokens_CT[..., None], axis=-1)[..., 0]


def right_tokens(tokens_CT):
    return (np.asarray(tokens_CT) == GROUPS[:, None] % V).astype(np.float32)


def right_share(tokens_CT):
    return right_tokens(tokens_CT).mean(-1)


def turns_of(tokens_CT):
    """Each token is a turn, in a state that all completions of a prompt share."""
    numbers = np.broadcast_to(np.arange(T), (P * G, T))
    return Turns(numbers, right_tokens(tokens_CT) / T, [["a", "b", "c"]] * (P * G), GROUPS < 0)


def advantages_of(algorithm, objective, scored):
    if objective.algorithm == "ppo":
        zeros = np.zeros((P * G, T), np.float32)
        return ppo.token_advantages(scored, Column.of(zeros), zeros[:, 0], CriticSettings())[0].dense()
    found = algorithm.advantages(scored)
    found = found.dense() if isinstance(found, Column) else np.asarray(found)
    return np.broadcast_to(found if found.ndim == 2 else found[:, None], (P * G, T))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_teaches_a_table_of_logits(name):
    objective = settings(name).objective
    algorithm = find(objective)
    start = jnp.zeros((P, T, V))

    @jax.jit
    def gradient(table, tokens, advantages, mask, slots):
        def loss(table):
            logps, ref = logps_of(table, tokens)[slots], logps_of(start, tokens)[slots]
            terms = Terms(logps, jax.lax.stop_gradient(logps), advantages[slots], mask, ref)
            counts = {"n_tokens": mask.sum(), "n_sequences": (mask.sum(-1) > 0).sum()}
            found = algorithm.surrogate(terms)[0]
            return aggregate(found, mask, objective.aggregation, constant=objective.constant, **counts)

        return jax.grad(loss)(table)

    table, shares = start, []
    for number in range(30):
        key = jax.random.fold_in(jax.random.key(3), number)
        tokens = jax.random.categorical(key, table[GROUPS])
        totals = right_share(tokens)
        shares.append(totals.mean())
        greedy = right_share(jnp.argmax(table, -1)[GROUPS])
        everything = totals > -1
        scored = Scored(
            totals, GROUPS, everything, Column.of(np.asarray(MASK)), Column.of(np.asarray(0 * MASK)), greedy
        )
        if registry.ALGORITHMS[name].turns:
            scored = replace(scored, turns=turns_of(tokens), turn_rewards_NT=right_tokens(tokens) / T)
        keep = (algorithm.keep or algorithm.signal or informative)(scored)
        advantages = jnp.asarray(advantages_of(algorithm, objective, scored), jnp.float32)
        assert not algorithm.paired or all(keep[p == GROUPS].sum() in (0, 2) for p in range(P))
        # As the rounds pack them: what is trained lies first, the two of a pair side by side.
        slots = np.argsort(~keep, kind="stable")
        slope = gradient(table, tokens, advantages, MASK * keep[slots, None], slots)
        table = table - 0.5 * slope / jnp.maximum(jnp.abs(slope).max(), 1e-12)
    assert np.mean(shares[-3:]) > np.mean(shares[:3]) + 0.4, shares


def of_the_user(objective, scale):
    return Algorithm(lambda scored: scale * group_relative("none")(scored), lambda terms: (-terms.logps_CT, {}))


def test_an_algorithm_of_the_user():
    own = f"{__name__}:of_the_user"
    config = settings(own, algorithm_arguments={"scale": 2.0}, dual_clip=3.0)
    ones = np.ones((2, 1))
    scored = Scored(np.asarray([1.0, 0.0]), np.zeros(2, int), np.ones(2, bool), Column.of(ones), Column.of(0 * ones))
    np.testing.assert_allclose(find(config.objective).advantages(scored), [1.0, -1.0])
    with pytest.raises(ValueError, match="returned int, not an Algorithm"):
        find(Objective(algorithm=f"{__name__}:no_algorithm"))
    with pytest.raises(ValueError, match="no_such_thing"):
        find(Objective(algorithm=f"{__name__}:no_such_thing"))


def no_algorithm(objective):
    return 3


LOG_RHO = jnp.log(jnp.asarray([[0.25, 1.0, 4.0], [1.0, 1.5, 1.0]]))


@pytest.mark.parametrize(
    ("correction", "wanted"),
    [
        ("none", [[1, 1, 1], [1, 1, 1]]),
        ("truncate", [[0.25, 1, 2], [1, 1.5, 1]]),
        ("mask", [[0, 1, 0], [1, 1.5, 1]]),
        ("sequence", [[1, 1, 1], [1.5, 1.5, 1.5]]),
        ("sequence-mask", [[0.25, 1, 4], [1, 1.5, 1]]),
    ],
)
def test_corrections_between_sampler_and_trainer(correction, wanted):
    objective = Objective(correction=correction, importance_min=0.5, importance_max=2.0)
    found = correction_weights(objective, LOG_RHO, jnp.zeros((2, 3)), jnp.ones((2, 3)))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_completion_far_off_policy_leaves_by_its_mean_ratio():
    objective = Objective(correction="sequence-mask", importance_min=0.9, importance_max=1.1)
    found = correction_weights(objective, LOG_RHO, jnp.zeros((2, 3)), jnp.ones((2, 3)))
    np.testing.assert_allclose(found[1], 0.0)


def test_k3_with_the_gradient_of_k2_and_clamps():
    logps, ref, mask = jnp.asarray([[-1.0]]), jnp.asarray([[-1.5]]), jnp.ones((1, 1))

    def of(kind, **more):
        return jax.value_and_grad(lambda x: kl_loss(Objective(kl_kind=kind, **more), x, ref, mask).sum())(logps)

    assert of("k3-k2")[0] == of("k3")[0] != of("k2")[0]
    np.testing.assert_allclose(of("k3-k2")[1], of("k2")[1])
    value, slope = of("k3", kl_clamp=0.05)
    np.testing.assert_allclose(value, 0.05)
    assert slope == 0


def test_quantiles_of_the_ratio_come_from_counts_that_add_up():
    log_rho = np.random.default_rng(0).normal(0.0, 0.05, (64, 128)).astype(np.float32)
    halves = [log_ratio_bins(jnp.asarray(x), jnp.zeros_like(x), jnp.ones_like(x)) for x in np.split(log_rho, 2)]
    names = ("old_n_tokens", "old_mismatch_k3", "old_weight", "old_weight_sq")
    sums = dict.fromkeys(names, 1.0)
    found = mismatch_means(sums | {k: float(halves[0][k] + halves[1][k]) for k in halves[0]})
    wanted = np.exp(np.quantile(log_rho, [0.01, 0.5, 0.99]))
    np.testing.assert_allclose([found[f"ratio_p{q}"] for q in ("01", "50", "99")], wanted, atol=0.03)  # bins of 0.05


def test_coefficients_follow_their_targets():
    config = settings("grpo", kl_target=0.1, kl_horizon=100.0, entropy_target=1.0, entropy_step=0.25)
    high = Coefficients().next(config, {"kl": 1.0, "entropy": 0.5, "completions": 20, "kept": 0.5})
    assert (high.kl_scale, high.entropy_coef) == (pytest.approx(1.02), 0.25)
    low = high.next(config, {"kl": 0.0, "entropy": 2.0, "completions": 10, "kept": 1.0})
    assert low.kl_scale < high.kl_scale and low.entropy_coef == 0.0
    assert low.next(config, {"kl": 0.1, "entropy": 2.0, "completions": 10, "kept": 1.0}).entropy_coef == 0.0
    plain = settings("grpo")
    assert Coefficients().next(plain, {"kl": 1.0, "completions": 10, "kept": 1.0}) == Coefficients()


SCORED = Scored(
    np.asarray([1.0, 0.0], np.float32), np.zeros(2, int), np.ones(2, bool),
    Column.of(np.asarray([[1, 1, 1], [1, 1, 0]], np.float32)), Column.of(np.zeros((2, 3), np.float32)),
)  # fmt: skip
VALUES = Column.of(np.asarray([[0.5, 0.5, 0.5], [0.2, 0.2, 0.0]], np.float32))


def test_a_truncated_completion_goes_on_with_the_value_of_its_last_state():
    after = np.asarray([0.0, 0.7])
    plain = ppo.token_advantages(SCORED, VALUES, after, CriticSettings(), lam=1.0)[1].dense()
    np.testing.assert_allclose(plain, [[1, 1, 1], [0, 0, 0]], atol=1e-6)
    more = ppo.token_advantages(SCORED, VALUES, after, CriticSettings(bootstrap_truncated=True), lam=1.0)[1].dense()
    np.testing.assert_allclose(more, [[1, 1, 1], [0.7, 0.7, 0]], atol=1e-6)


def test_the_kl_in_the_reward_lies_on_every_token_and_the_score_on_the_last():
    scored = replace(SCORED, penalty=Column.of(np.asarray([[0.1, 0.2, 0.3], [0.1, 0.1, 0.0]], np.float32)))
    np.testing.assert_allclose(scored.rewards_NT, [[-0.1, -0.2, 0.7], [-0.1, -0.1, 0.0]], atol=1e-6)
    np.testing.assert_allclose(scored.rewards_N, [0.4, -0.2], atol=1e-6)


def test_whitened_rewards_have_spread_one_and_keep_their_mean():
    values, critic = Column.of(np.zeros((2, 3), np.float32)), CriticSettings(whiten_rewards=True)
    returns = ppo.token_advantages(SCORED, values, np.zeros(2), critic, lam=1.0)[1].dense()
    rewards = np.asarray([returns[0, 0] - returns[0, 1], returns[0, 1] - returns[0, 2], returns[0, 2]])
    rewards = np.concatenate([rewards, [returns[1, 0] - returns[1, 1], returns[1, 1]]])
    np.testing.assert_allclose([rewards.mean(), rewards.std(ddof=1)], [0.2, 1.0], rtol=1e-5)


def test_aggregation_is_refused_by_the_ratio():
    for ratio in ("sequence", "sequence-token", "sequence-sum"):
        registry.check_aggregation(ratio, "sequence-mean-token-mean")
        with pytest.raises(ValueError, match="token-mean"):
            registry.check_aggregation(ratio, "token-mean")

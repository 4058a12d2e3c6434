"""An algorithm of the user, corrections, coefficients, and the KL in the reward (formulas: the oracle)."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.algorithms import registry
from rlhf.tuning.algorithms.algorithm import Algorithm, Scored, find, group_relative
from rlhf.tuning.algorithms.diagnostics import Coefficients, mismatch_means
from rlhf.tuning.algorithms.flat import Column
from rlhf.tuning.algorithms.objective import correction_weights
from rlhf.tuning.algorithms.settings import Objective, RoundSettings
from rlhf.tuning.losses.importance import log_ratio_bins


def settings(algorithm, **more):
    more |= {"constant": 3.0} if registry.presets(algorithm).get("aggregation") == "constant" else {}
    return RoundSettings.of(algorithm, **more)


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
    ("correction", "bounds", "wanted"),
    [
        ("none", (0.5, 2.0), [[1, 1, 1], [1, 1, 1]]),
        ("truncate", (0.5, 2.0), [[0.25, 1, 2], [1, 1.5, 1]]),
        ("mask", (0.5, 2.0), [[0, 1, 0], [1, 1.5, 1]]),
        ("sequence", (0.5, 2.0), [[1, 1, 1], [1.5, 1.5, 1.5]]),
        ("sequence-mask", (0.5, 2.0), [[0.25, 1, 4], [1, 1.5, 1]]),
        # By the mean ratio of a completion.
        ("sequence-mask", (0.9, 1.1), [[0.25, 1, 4], [0, 0, 0]]),
    ],
)
def test_corrections_between_sampler_and_trainer(correction, bounds, wanted):
    objective = Objective(correction=correction, importance_min=bounds[0], importance_max=bounds[1])
    found = correction_weights(objective, LOG_RHO, jnp.zeros((2, 3)), jnp.ones((2, 3)))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


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


def test_the_kl_in_the_reward_lies_on_every_token_and_the_score_on_the_last():
    scored = replace(SCORED, penalty=Column.of(np.asarray([[0.1, 0.2, 0.3], [0.1, 0.1, 0.0]], np.float32)))
    np.testing.assert_allclose(scored.rewards_NT, [[-0.1, -0.2, 0.7], [-0.1, -0.1, 0.0]], atol=1e-6)
    np.testing.assert_allclose(scored.rewards_N, [0.4, -0.2], atol=1e-6)


def test_aggregation_is_refused_by_the_ratio():
    for ratio in ("sequence", "sequence-token", "sequence-sum"):
        registry.check_aggregation(ratio, "sequence-mean-token-mean")
        with pytest.raises(ValueError, match="token-mean"):
            registry.check_aggregation(ratio, "token-mean")

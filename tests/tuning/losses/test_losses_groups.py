"""Group statistics: whole groups, failed samples left out, zero-variance groups found."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.algorithms import advantages as adv
from rlhf.tuning.losses.groups import informative_groups, is_informative
from rlhf.tuning.losses.returns import whiten

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 0.6, 0.6, 0.6, 0.6, 0.1, 0.9, 0.4, 0.2])
IDS = np.repeat(np.arange(3), 4)
ESTIMATORS = {
    "std": adv.group_advantages,
    "none": lambda r, ids, **kw: adv.group_advantages(r, ids, normalisation="none", **kw),
    "batch-std": lambda r, ids, **kw: adv.group_advantages(r, ids, normalisation="batch-std", **kw),
    "rloo": adv.rloo_advantages,
    "passk": adv.passk_advantages,
}


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ESTIMATORS)
def test_failed_samples_leave_every_statistic(name: str) -> None:
    valid = np.ones(12, bool)
    valid[[1, 8]] = False
    planted = np.where(valid, REWARDS, np.nan)
    got = ESTIMATORS[name](jnp.asarray(planted), IDS, valid=jnp.asarray(valid))
    without = ESTIMATORS[name](jnp.asarray(REWARDS[valid]), IDS[valid])
    np.testing.assert_allclose(got[valid], without, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(got[~valid], 0)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ESTIMATORS)
def test_order_and_numbers_do_not_matter(name: str) -> None:
    shuffle, ids = np.random.default_rng(1).permutation(12), np.repeat([7, -3, 40], 4)
    ordered = np.asarray(ESTIMATORS[name](jnp.asarray(REWARDS), IDS))
    shuffled = ESTIMATORS[name](jnp.asarray(REWARDS[shuffle]), ids[shuffle])
    np.testing.assert_allclose(shuffled, ordered[shuffle], rtol=1e-10, atol=1e-12)


def opo(rewards, ids):
    return adv.opo_advantages(rewards, ids, jnp.arange(1, 1 + rewards.size))


def whitened(rewards, ids):
    return whiten(rewards[None], jnp.ones((1, rewards.size)))[0]


@pytest.mark.parametrize("name", ["std", "none", "batch-std", "rloo", "passk", "opo", "whitened"])
def test_rewards_far_from_zero_have_the_advantages_of_those_near_it(name: str) -> None:
    estimate = {"opo": opo, "whitened": whitened} | ESTIMATORS
    # Multiples of 1/128 are exact in float32 at 1000 too: the rewards differ by the shift and by nothing else.
    near = jnp.asarray(np.random.default_rng(2).integers(0, 9, 60) / 128, jnp.float32)
    ids = jnp.asarray(np.arange(60) // 12)
    far = estimate[name](near + 1000, ids)
    np.testing.assert_allclose(far, estimate[name](near, ids), rtol=1e-5, atol=1e-6)


def test_equal_rewards_give_exactly_zero_and_carry_no_signal() -> None:
    flat, groups = np.asarray([0.1, 0.1, 0.1, 0.7, 0.1, 0.1], np.float32), np.repeat([4, 2], 3)
    np.testing.assert_array_equal(adv.group_advantages(jnp.asarray(flat), groups, eps=1e-9)[:3], 0)
    every, without = np.ones(6, bool), np.array([True, True, True, False, True, True])
    np.testing.assert_array_equal(informative_groups(flat, groups, every), [False] * 3 + [True] * 3)
    assert not informative_groups(flat, groups, without).any()
    assert not is_informative([0.5]) and not is_informative([0.5, 0.5 + 1e-8]) and is_informative([0.5, 0.5 + 1e-5])


def test_a_group_of_failures_gives_zero() -> None:
    valid = jnp.array([0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 0])
    for name, estimator in ESTIMATORS.items():
        got = estimator(jnp.where(valid > 0, REWARDS, jnp.nan), IDS, valid=valid)
        assert np.isfinite(got).all(), name
        np.testing.assert_array_equal(got[np.asarray(valid) == 0], 0)


@pytest.mark.usefixtures("float64")
def test_groups_do_not_depend_on_the_batch() -> None:
    alone = adv.group_advantages(jnp.asarray(REWARDS[:4]), IDS[:4])
    np.testing.assert_allclose(adv.group_advantages(jnp.asarray(REWARDS), IDS)[:4], alone, rtol=1e-12)

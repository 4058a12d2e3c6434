"""Advantages that are whitened over a round are made by blocks of rows, and are those of the padded round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.algorithms import flat, ppo
from rlhf.tuning.algorithms.algorithm import Scored, find
from rlhf.tuning.algorithms.flat import Column, whiten
from rlhf.tuning.algorithms.settings import CriticSettings, RoundSettings
from rlhf.tuning.losses import returns
from rlhf.tuning.losses.rewards import token_rewards
from rlhf.tuning.precision import real

N, T = 11, 7


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(flat, "ROWS_AT_ONCE", 3)
    with jax.enable_x64(True):
        yield


def kept(x_NT, lengths_N):
    return Column.of(x_NT.astype(real()), lengths_N)


@pytest.fixture
def drawn():
    """A round as `run_round` has it, and the same as arrays: (scored, values, after, mask, values, penalty)."""
    rng = np.random.default_rng(0)
    lengths_N = rng.integers(0, T + 1, N)
    inside_NT = np.arange(T) < lengths_N[:, None]
    # Observations within rows, and completions that are not in the loss.
    mask_NT = inside_NT & (rng.random((N, T)) > 0.2) & (np.arange(N) != 4)[:, None]
    values_NT, penalty_NT = rng.standard_normal((N, T)) * inside_NT, 0.1 * rng.standard_normal((N, T)) * mask_NT
    totals_N, cut_N, after_N = rng.integers(0, 2, N) + 1000.0, rng.random(N) < 0.5, rng.standard_normal(N)

    def row(i):
        return mask_NT[i, : lengths_N[i]].astype(real()) if mask_NT[i].any() else np.zeros(0)

    mask = Column(row, N, T, np.dtype(real()))
    scored = Scored(totals_N, np.arange(N) // 2, np.ones(N, bool), mask, kept(penalty_NT, lengths_N))
    return scored, kept(values_NT, lengths_N), np.where(cut_N, after_N, 0.0), mask_NT, values_NT, penalty_NT


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"whiten_rewards": True}, {"bootstrap_truncated": True, "gamma": 0.9}])
def test_a_critics_advantages_are_those_of_the_padded_round(drawn, changes, monkeypatch):
    scored, values, after_N, mask_NT, values_NT, penalty_NT = drawn
    critic, most = CriticSettings(**changes), []

    def seen(rewards_CT, *arguments, **settings):
        most.append(len(rewards_CT))
        return returns.gae(rewards_CT, *arguments, **settings)

    monkeypatch.setattr(ppo, "gae", seen)
    advantages, found = ppo.token_advantages(scored, values, after_N, critic)
    # Nothing of the size of the padded round.
    assert max(most) == 3 and sum(most) == N
    mask = jnp.asarray(mask_NT, real())
    rewards = token_rewards(jnp.asarray(scored.totals_N), jnp.asarray(penalty_NT), mask)
    rewards = returns.whiten(rewards, mask, shift_mean=False) if critic.whiten_rewards else rewards
    after = jnp.asarray(after_N) if critic.bootstrap_truncated else None
    raw, plain = returns.gae(rewards, jnp.asarray(values_NT), mask, critic.gamma, critic.lam, bootstrap_B=after)
    assert advantages.dtype == np.float64
    np.testing.assert_allclose(found.dense(), plain, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(advantages.dense(), returns.whiten(raw, mask), rtol=1e-11, atol=1e-12)


def test_whitened_rewards_to_go_are_those_of_the_padded_round(drawn):
    scored, *_, mask_NT, _, penalty_NT = drawn
    found = find(RoundSettings.of("reinforce-pp").objective).advantages(scored)
    mask = jnp.asarray(mask_NT, real())
    rewards = token_rewards(jnp.asarray(scored.totals_N), jnp.asarray(penalty_NT), mask)
    expected = returns.whiten(returns.reward_to_go(rewards, mask), mask)
    np.testing.assert_allclose(found.dense(), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_numbers_that_are_equal_or_far_from_zero_or_none_are_whitened_alike(shift_mean):
    mask_NT = np.arange(T) < np.arange(N)[:, None] % T
    for x_NT in (np.full((N, T), 1e6), 1e6 + np.arange(N * T).reshape(N, T) / 1e3):
        for mask in (mask_NT, np.zeros_like(mask_NT)):
            found = kept(x_NT, np.full(N, T))
            whiten(found, Column.of(mask), shift_mean=shift_mean)
            expected = returns.whiten(jnp.asarray(x_NT), jnp.asarray(mask), shift_mean=shift_mean)
            np.testing.assert_allclose(found.dense(), expected, rtol=1e-9, atol=1e-9)


def test_blocks_have_no_more_rows_and_tokens_than_may_be_padded_at_once(monkeypatch):
    monkeypatch.setattr(flat, "TOKENS_AT_ONCE", 20)
    for count, width, sizes in ((7, 1, [3, 3, 1]), (5, 10, [2, 2, 1]), (2, 100, [1, 1])):
        assert [len(rows) for rows in Column.of(np.zeros((count, width))).blocks()] == sizes

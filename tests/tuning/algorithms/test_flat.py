"""Numbers of tokens are kept without padding, and read as the arrays that padding would have made."""

import dataclasses
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.algorithms.algorithm import Scored
from rlhf.tuning.algorithms.flat import ROWS_AT_ONCE, Column
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.rounds import shared_N, spread
from rlhf.tuning.algorithms.selection import Selection
from rlhf.tuning.algorithms.settings import RoundSettings
from rlhf.tuning.losses.masks import sampled_mask
from rlhf.tuning.losses.rewards import kl_penalty, sequence_rewards

LENGTHS, WIDTH = np.asarray([3, 0, 5, 1]), 6


def padded(seed=0, lengths=LENGTHS, width=WIDTH):
    """Random numbers [N, T], 0 past the ends."""
    numbers = np.random.default_rng(seed).normal(size=(len(lengths), width))
    return np.where(np.arange(width) < lengths[:, None], numbers, 0.0)


def made_up(count, longest, seed=0):
    """A round of random completions in groups of four, some of whose tokens nobody sampled."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    mu = [np.where(rng.random(n) < 0.9, -rng.random(n), np.nan).astype(np.float32) for n in lengths]
    tokens = [rng.integers(0, 97, n, np.int32) for n in lengths]
    totals = rng.integers(0, 3, count).astype(np.float32)
    valid = rng.random(count) < 0.9
    return RoundData([[1, 2]] * count, tokens, mu, np.arange(count) // 4, totals, valid, rng.random(count) < 0.2)


def test_a_column_reads_as_the_array_that_it_is_of():
    x_NT = padded()
    column = Column.of(x_NT + 7 * (x_NT == 0), LENGTHS)
    assert column.lengths_N.tolist() == LENGTHS.tolist()
    np.testing.assert_array_equal(column.dense(), x_NT)
    np.testing.assert_array_equal(column.gather([2, -1, 0]), [x_NT[2], np.zeros(WIDTH), x_NT[0]])


def test_what_a_pass_puts_back_has_neither_padding_nor_empty_slots():
    x_NT, column = padded(), Column.zeros(LENGTHS, WIDTH, np.float64)
    column.put(np.asarray([2, -1, 3]), np.stack([x_NT[2] + 9 * (x_NT[2] == 0), np.full(WIDTH, 9.0), x_NT[3]]))
    np.testing.assert_array_equal(column.dense(), np.where([[0], [0], [1], [1]], x_NT, 0.0))


@pytest.mark.parametrize("truncated", ["keep", "mask", "mask-loss"])
def test_the_mask_of_a_round_is_that_of_padded_log_probabilities(truncated):
    data = made_up(12, 9)
    found = Selection.of(data, RoundSettings.of("grpo", truncated=truncated)).scored
    mu_NT = np.zeros((12, 12), np.float32)
    for i, mu in enumerate(data.mu):
        mu_NT[i, : len(mu)] = mu
    expected = sampled_mask(np.asarray([len(mu) for mu in data.mu]), mu_NT)
    np.testing.assert_array_equal(data.sampler.dense(), mu_NT)
    np.testing.assert_array_equal(data.sampled.dense(), expected)
    in_loss = data.valid_N & (~data.truncated_N if truncated != "keep" else True)
    np.testing.assert_array_equal(found.mask_NT, expected & in_loss[:, None])
    assert found.mask_NT.dtype == np.float32


def test_an_algorithm_of_ones_own_reads_arrays_whatever_the_round_keeps():
    data = made_up(12, 9)
    kept = Selection.of(data, RoundSettings.of("grpo")).scored
    penalty = Column.of(0.1 * data.sampled.dense().astype(np.float32), data.lengths_N)
    kept = dataclasses.replace(kept, penalty=penalty)
    plain = Scored(kept.totals_N, kept.groups_N, kept.valid_N, Column.of(kept.mask_NT), Column.of(penalty.dense()))
    for name in ("mask_NT", "rewards_N", "rewards_NT"):
        np.testing.assert_array_equal(getattr(kept, name), getattr(plain, name))
    assert isinstance(kept.mask_NT, np.ndarray) and kept.mask_NT.shape == (12, data.width)


def test_rewards_less_their_kl_do_not_depend_on_the_blocks():
    """Sums of rows as of the whole array, bit for bit; so is the KL of blocks of rows."""
    count = 2 * ROWS_AT_ONCE + 37
    lengths = np.random.default_rng(1).integers(0, 25, count)
    old, ref = (Column.of(padded(seed, lengths, 24).astype(np.float32), lengths) for seed in (2, 3))
    mask = Column.of(np.ones((count, 24), bool), lengths)

    def of(rows):
        return np.asarray(kl_penalty(*(jnp.asarray(c.gather(rows)) for c in (old, ref, mask)), coef=0.1, kind="k3"))

    whole_NT, by_blocks = of(range(count)), Column.zeros(lengths, 24, np.float32)
    for rows in mask.blocks():
        by_blocks.put(rows, of(rows))
    np.testing.assert_array_equal(by_blocks.dense(), whole_NT)
    totals = np.random.default_rng(4).random(count).astype(np.float32)
    ones = np.ones(count, bool)
    found = Scored(totals, np.arange(count), ones, mask, by_blocks).rewards_N
    np.testing.assert_array_equal(found, sequence_rewards(totals, whole_NT))


@pytest.mark.parametrize("by_token", [False, True])
def test_the_advantages_of_trained_tokens_are_those_of_dense_arrays(by_token):
    with jax.enable_x64(True):
        mask_NT, keep_N = padded(5) > -0.5, np.asarray([True, True, True, False])
        mask_NT &= np.arange(WIDTH) < LENGTHS[:, None]
        trained = Column.of(mask_NT, LENGTHS).only(keep_N)
        given_NT = padded(6) if by_token else np.repeat(np.arange(4.0)[:, None], WIDTH, 1)
        given_NT[0] = 2.5
        advantages = Column.of(given_NT, LENGTHS)
        kept_NT = mask_NT & keep_N[:, None]
        assert kept_NT[0].any() and kept_NT[2].sum() > 1 and not kept_NT[3].any()
        assert spread(trained, advantages) == given_NT[kept_NT].std()
        np.testing.assert_array_equal(shared_N(trained, advantages), [2.5, np.nan, np.nan if by_token else 2.0, np.nan])
    of_all = Column.of(np.ones((1, 5000), bool))
    numbers = np.random.default_rng(7).normal(size=(1, 5000)).astype(np.float32)
    assert spread(of_all, Column.of(numbers)) == float(numbers.std())
    assert np.isnan(shared_N(trained, None)).all()


def test_a_round_holds_no_padded_array():
    """One long completion among short ones: padded, a number of each token would be 400 times those of the tokens."""
    count, longest = 512, 4096
    lengths = [longest if i == 7 else 2 for i in range(count)]
    tokens, mu = [np.zeros(n, np.int32) for n in lengths], [np.full(n, -1.0, np.float32) for n in lengths]
    ones = np.ones(count, bool)
    totals = (np.arange(count) % 2).astype(np.float32)
    data = RoundData([[1]] * count, tokens, mu, np.arange(count) // 4, totals, ones, ~ones)
    tracemalloc.start()
    try:
        found = Selection.of(data, RoundSettings.of("grpo"))
        found.divided(found.candidates())
        spread(found.scored.mask, Column.zeros(data.lengths_N, data.width, np.float32))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < count * longest / 4


def test_tokens_without_their_log_probabilities_are_refused():
    one = np.ones(1, bool)
    with pytest.raises(ValueError, match="completion 0 of the round has 3 tokens and 2 log-probabilities"):
        RoundData([[1]], [[5, 6, 7]], [[-1.0, -1.0]], np.zeros(1, int), np.ones(1, np.float32), one, ~one)

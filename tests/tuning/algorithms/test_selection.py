"""Statistics are of what is trained on: whatever leaves the loss leaves them, and what stays has its whole reward."""

import dataclasses

import numpy as np
import pytest

from rlhf.tuning.algorithms import ppo
from rlhf.tuning.algorithms.algorithm import Algorithm, find
from rlhf.tuning.algorithms.flat import Column
from rlhf.tuning.algorithms.registry import ALGORITHMS, presets
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.selection import Selection
from rlhf.tuning.algorithms.settings import CriticSettings, RoundSettings
from rlhf.tuning.algorithms.turns import Turns

GROUPS = np.repeat(np.arange(5), 4)
N = len(GROUPS)
# Two of the first group, the best of the second, all of the third but one, the fourth whole; none of the last.
CUT = np.isin(np.arange(N), [0, 2, 5, 8, 9, 10, 12, 13, 14, 15])


pytestmark = pytest.mark.usefixtures("float64")


def settings(name, **more):
    constant = {"constant": 8.0} if presets(name).get("aggregation") == "constant" else {}
    return RoundSettings.of(name, **constant | more)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    completions = [rng.integers(0, 9, n).tolist() for n in rng.integers(1, 7, N)]
    totals = rng.integers(0, 4, N).astype(np.float32)
    totals[5], totals[4], totals[6] = 9.0, 1.0, 2.0
    mu = [[-1.0] * len(c) for c in completions]
    everywhere = np.ones(N, bool)
    data = RoundData([[int(g)] for g in GROUPS], completions, mu, GROUPS, totals, everywhere, CUT, 0.1 * GROUPS)
    return dataclasses.replace(data, turns=token_turns(data))


def only(data, keep):
    kept = np.flatnonzero(keep)
    values = {
        f.name: getattr(data, f.name) for f in dataclasses.fields(data) if f.name not in ("parts", "turns", "widest")
    }
    some = {k: v[kept] if isinstance(v, np.ndarray) else [v[i] for i in kept] for k, v in values.items()}
    found = RoundData(**some)
    return dataclasses.replace(found, turns=token_turns(found))


def token_turns(data):
    """Each token is a turn, in a state that many share."""
    mask_NT = data.sampled.dense()
    numbers = np.cumsum(mask_NT, -1) - 1
    states = [[str(token % 3) for token in tokens] for tokens in data.completions]
    return Turns(np.where(mask_NT, numbers, -1), np.zeros(mask_NT.shape, np.float32), states, mask_NT[:, 0] < 0)


def taken(data, config):
    """(which are trained on, advantages [N, T], groups of the steps as tokens) with a KL that differs by completion."""
    chosen = Selection.of(data, config)
    found = chosen.scored
    lengths = np.asarray([len(c) for c in data.completions])
    penalty = 0.01 * lengths[:, None] * found.mask_NT if config.kl_in_reward else 0.0 * found.mask_NT
    chosen.scored = found = dataclasses.replace(found, penalty=Column.of(penalty))
    keep = chosen.trained()
    if config.needs_critic:
        values = Column.of(0.3 * found.mask_NT * lengths[:, None])
        advantages = ppo.token_advantages(found, values, 0.0 * lengths, CriticSettings(lam=0.9))[0].dense()
    else:
        advantages = chosen.algorithm.advantages(found)
        advantages = advantages.dense() if isinstance(advantages, Column) else np.asarray(advantages)
    advantages = advantages if advantages.ndim == 2 else advantages[:, None] * found.mask_NT
    groups = [group for step in data.divided(keep, keep, 2).groups for group in step]
    steps = [(group.prompt.tolist(), [tokens.tolist() for tokens in group.completions]) for group in groups]
    return keep, advantages, steps


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_masked_completion_might_as_well_not_be_there(name, rows):
    keep, advantages, steps = taken(rows, settings(name, truncated="mask"))
    alone_keep, alone_advantages, alone_steps = taken(only(rows, ~CUT), settings(name))
    assert not (keep & CUT).any() and keep.any()
    assert (keep[~CUT] == alone_keep).all() and steps == alone_steps
    width = alone_advantages.shape[1]
    np.testing.assert_allclose(advantages[keep, :width], alone_advantages[alone_keep], rtol=1e-9)
    if find(settings(name).objective).paired:
        assert all(len(completions) == 2 for _, completions in steps)


def test_out_of_the_loss_alone_a_reward_counts_in_the_baseline(rows):
    keep, advantages, _ = taken(rows, settings("dr-grpo", truncated="mask-loss"))
    _, whole, _ = taken(rows, settings("dr-grpo"))
    assert keep.any() and not (keep & CUT).any()
    np.testing.assert_array_equal(advantages[keep], whole[keep])
    assert (
        np.abs(advantages[keep][:, 0] - taken(rows, settings("dr-grpo", truncated="mask"))[1][keep][:, 0]).max() > 0.1
    )


@pytest.mark.parametrize(
    ("changes", "stays"),
    [
        ({"kl_coef": 0.0}, True),
        ({"kl_coef": 0.1}, True),
        ({"kl_coef": 0.0, "tied_groups": "drop"}, False),
        ({"kl_coef": 0.1, "tied_groups": "drop"}, False),
    ],
)
def test_tied_groups_count_whatever_the_weight_of_the_kl(changes, stays, rows):
    tied = dataclasses.replace(rows, totals_N=np.where(GROUPS == 4, 1.0, rows.totals_N))
    assert taken(tied, settings("grpo", **changes))[0][GROUPS == 4].all() == stays
    assert not taken(tied, settings("dapo"))[0][GROUPS == 4].any()


def best(objective):
    keep = lambda scored: scored.rewards_N == scored.rewards_N.max()  # noqa: E731
    return Algorithm(lambda scored: scored.totals_N, ppo.clipped(objective), keep=keep)


def test_a_choice_of_ones_own_is_made_with_the_kl_of_every_completion(rows):
    chosen = Selection.of(rows, RoundSettings.of(f"{__name__}:best", prompts_per_step=2, kl_in_reward=0.1))
    assert chosen.candidates().all() and chosen.trained().sum() == 1


def test_groups_that_tie_on_the_task_differ_by_their_kl(rows):
    solved = dataclasses.replace(rows, totals_N=np.ones(N, np.float32))
    lengths = np.asarray([len(c) for c in rows.completions])
    assert taken(solved, settings("rloo"))[0].all()
    keep, advantages, _ = taken(solved, settings("rloo", tied_groups="drop"))
    differ = np.asarray([len(set(lengths[g == GROUPS])) > 1 for g in GROUPS])
    assert (keep == differ).all() and differ.any()
    assert (np.abs(advantages[keep][:, 0]) > 0).any()
    assert not taken(solved, settings("rloo", kl_in_reward=0.0, tied_groups="drop"))[0].any()

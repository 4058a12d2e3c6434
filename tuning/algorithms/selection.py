"""Which completions of a round count, and which of those are trained on.

    failed reward or episode                 leaves everything: baselines, whitening, coefficients, loss
    `truncated: mask`, `keep_most_varied`    likewise
    `truncated: mask-loss`                   leaves the loss; its reward counts in the baseline of its group
    group of equal rewards                   no advantage; `tied_groups` says whether it counts in its step
    round that tells nothing apart           likewise, where advantages are scaled by the round

Axes: N completions of the round, T completion tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from rlhf.tuning.algorithms import registry
from rlhf.tuning.algorithms.algorithm import Algorithm, Scored, informative
from rlhf.tuning.algorithms.diagnostics import pass_histogram
from rlhf.tuning.algorithms.flat import Column, sums_of_rows
from rlhf.tuning.algorithms.round_data import Division, RoundData
from rlhf.tuning.algorithms.settings import RoundSettings
from rlhf.tuning.losses.groups import LEAST_SPREAD, informative_groups, is_informative, most_varied_groups
from rlhf.tuning.precision import real


def scored(data: RoundData, settings: RoundSettings) -> Scored:
    """The round as an algorithm sees it, without a KL in the reward so far."""
    valid_N = _counted(data, settings)
    valid_N = valid_N & ~filtered(data, settings)
    # 0 for NaN: 0 x NaN, as masks would compute it, is NaN.
    totals_N = np.where(valid_N, data.totals_N, 0.0).astype(real())
    mask = mask_in_loss(data, valid_N, settings)
    # One zero, seen as an array.
    penalty_NT = np.broadcast_to(real().type(0), (mask.count, mask.width))
    found = Scored(totals_N, data.groups_N, valid_N, mask, penalty_NT, data.greedy_N)
    if data.turns is None:
        if settings.credit == "turn":
            raise ValueError("credit: turn needs turns, and the rollouts have none: sample them from an environment")
        return found
    rewards_NT = None
    if settings.credits_turns:
        rewards_NT = data.turns.token_rewards_NT(mask.dense(), settings.environment_weight)
    return dataclasses.replace(found, turns=data.turns, turn_rewards_NT=rewards_NT)


def mask_in_loss(data: RoundData, valid_N: np.ndarray, settings: RoundSettings) -> Column:
    """1 on the tokens of valid completions that may take part in the loss, in the type of `real`."""
    in_loss_N, nothing = _in_loss(data, valid_N, settings), np.zeros(0, bool)

    def row(i: int) -> np.ndarray:
        return data.mask_of(i) if in_loss_N[i] else nothing

    return Column(row, len(in_loss_N), data.width, real())


def _counted(data: RoundData, settings: RoundSettings) -> np.ndarray:
    """Completions with a reward that counts, [N] bool."""
    return data.valid_N & ~data.truncated_N if settings.truncated == "mask" else data.valid_N


def filtered(data: RoundData, settings: RoundSettings) -> np.ndarray:
    """Completions of the groups that `keep_most_varied` leaves out, [N] bool."""
    if settings.keep_most_varied is None:
        return np.zeros(len(data.valid_N), bool)
    return ~most_varied_groups(data.totals_N, data.groups_N, _counted(data, settings), settings.keep_most_varied)


def candidates(data: RoundData, found: Scored, algorithm: Algorithm, settings: RoundSettings) -> np.ndarray:
    """Completions that may be trained on before the KL in the reward is known, [N] bool.

    Raises ValueError if the algorithm needs pairs after one prompt and a group has none.
    """
    if algorithm.paired:
        data.check_pairs(settings.algorithm)
    if settings.kl_in_reward > 0 and algorithm.keep is None:
        # Rewards that tie now may differ by their KL, which takes a forward pass.
        return _in_loss(data, found.valid_N, settings)
    return trained(data, found, algorithm, settings)


def trained(data: RoundData, found: Scored, algorithm: Algorithm, settings: RoundSettings) -> np.ndarray:
    """Completions in the loss, [N] bool, by their whole rewards (R9, R24)."""
    without = is_noise(found, algorithm, settings)
    regularised = without and settings.regularised and settings.tied_groups == "count"
    # A critic learns from rewards that are all equal too.
    if counts_ties(algorithm, settings) or regularised or (without and settings.needs_critic):
        return _in_loss(data, found.valid_N, settings)
    return _in_loss(data, with_signal(found, algorithm, settings), settings)


def counts_ties(algorithm: Algorithm, settings: RoundSettings) -> bool:
    """Whether groups without an advantage stay in their steps and denominators."""
    return algorithm.keep is None and settings.tied_groups == "count"


def divided(
    data: RoundData, found: Scored, algorithm: Algorithm, settings: RoundSettings, keep_N: np.ndarray
) -> Division:
    """The loss's completions `keep_N` in steps; micro-batches have those that may add anything but 0 to it."""
    computed_N = keep_N
    # A custom surrogate may have terms without an advantage; a KL in the reward that is still 0 is unknown.
    # Marks are relative to all tokens of a step.
    whole = settings.regularised or settings.entry is None or settings.top_entropy is not None or algorithm.mark
    known = settings.kl_in_reward == 0 or bool(sums_of_rows(found, "penalty_NT").any())
    if known and counts_ties(algorithm, settings) and not whole:
        computed_N = keep_N & with_signal(found, algorithm, settings)
    return data.divided(keep_N, computed_N, settings.prompts_per_step)


def moves(data: RoundData, found: Scored, algorithm: Algorithm, settings: RoundSettings) -> bool:
    """Whether the policy takes its steps: where it has anything to follow, and where ties count.

    A step without anything to follow moves weights too, by the optimizer's momentum and weight decay.
    """
    counts = counts_ties(algorithm, settings)
    return counts or settings.regularised or bool(with_signal(found, algorithm, settings).any())


def with_signal(found: Scored, algorithm: Algorithm, settings: RoundSettings) -> np.ndarray:
    """Completions with an advantage, [N] bool: those of the algorithm's own rule, else informative ones."""
    if is_noise(found, algorithm, settings):
        return np.zeros(len(found.valid_N), bool)
    return (algorithm.keep or algorithm.signal or informative)(found)


def is_noise(found: Scored, algorithm: Algorithm, settings: RoundSettings) -> bool:
    """Whether the advantages of the round would be noise of full size: divided by their spread over the round, in which
    the task tells no completions apart, so that the spread is that of a critic's error or of the KL alone."""
    if not settings.scaled_by_round:
        return False
    # A total says nothing of where turns earned it.
    by_turns = found.turn_rewards_NT is not None and bool(found.turn_rewards_NT.any())
    return not by_turns and not _teaching(found, algorithm, settings).any()


def informative_count(data: RoundData, found: Scored, algorithm: Algorithm, settings: RoundSettings) -> int:
    """Groups in the loss which the rewards of the task, before any KL, teach something: what they are held against
    differs from them (R25).

    That is the group's own, the greedy completion's, or, for other baselines, the rewards of the round.
    """
    # A reward outside the loss may teach what is inside.
    teaching = set(found.groups_N[_teaching(found, algorithm, settings)].tolist())
    return len(teaching & set(found.groups_N[_in_loss(data, found.valid_N, settings)].tolist()))


def overview(
    data: RoundData, found: Scored, algorithm: Algorithm, settings: RoundSettings, keep_N: np.ndarray
) -> dict[str, Any]:
    """Metrics of the data, and of the trained completions, `keep_N`."""
    filtered_N = filtered(data, settings)
    groups = set(data.groups_N[~filtered_N].tolist())
    metrics: dict[str, Any] = {
        "kept": float(keep_N.mean()),
        "tied": len(groups - set(data.groups_N[with_signal(found, algorithm, settings)].tolist())),
        "completions": len(data.completions),
        "groups": len(groups),
        "informative": informative_count(data, found, algorithm, settings),
        "pass_histogram": pass_histogram(data.totals_N, data.groups_N, data.valid_N),
    }
    if filtered_N.any():
        metrics["filtered"] = len(set(data.groups_N[filtered_N].tolist()))
    return metrics


def _teaching(found: Scored, algorithm: Algorithm, settings: RoundSettings) -> np.ndarray:
    """Completions whose rewards, before any KL, differ from their baseline, [N] bool."""
    totals_N, groups_N = found.totals_N, found.groups_N
    if settings.needs_greedy and found.greedy_N is not None:
        # NaN, of a greedy completion without a reward, is no difference.
        return found.valid_N & (np.abs(totals_N - found.greedy_N) >= LEAST_SPREAD)
    if algorithm.keep is None or algorithm.paired or settings.algorithm in registry.GROUP_BASELINE:
        return informative_groups(totals_N, groups_N, found.valid_N)
    return found.valid_N & is_informative(totals_N[found.valid_N])


def _in_loss(data: RoundData, keep_N: np.ndarray, settings: RoundSettings) -> np.ndarray:
    return keep_N if settings.truncated == "keep" else keep_N & ~data.truncated_N

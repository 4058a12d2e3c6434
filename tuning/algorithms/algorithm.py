"""The interface of an algorithm: advantages of scored rollouts, and a loss of each token. The train step knows neither.

Axes: N completions of the round, C completions of a micro-batch, T completion tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.algorithms import registry
from rlhf.tuning.algorithms.advantages import Normalisation, group_advantages
from rlhf.tuning.algorithms.flat import Column
from rlhf.tuning.algorithms.settings import Objective
from rlhf.tuning.algorithms.turns import Turns
from rlhf.tuning.allowed import check_module
from rlhf.tuning.losses.groups import informative_groups
from rlhf.tuning.losses.policy import Metrics, Terms, clipped_surrogate
from rlhf.tuning.losses.rewards import sequence_rewards, token_rewards
from rlhf.tuning.precision import real


@dataclasses.dataclass(frozen=True)
class Scored:
    """The scored rollouts of a round on the host: the input of `Algorithm.advantages`.

    Numbers of tokens are stored without padding. Each read of a property [N, T] pads them anew.
    """

    totals_N: np.ndarray
    """Reward of each completion, 0 where it is not valid."""
    groups_N: np.ndarray
    """Number of the prompt."""
    valid_N: np.ndarray
    """False where a reward failed: such a completion leaves every statistic (R9)."""
    mask: Column
    """1 on tokens of valid completions, all groups included; 0 where a completion's reward alone counts."""
    penalty: Column
    """The KL to subtract from the reward, weighted; 0 without one."""
    greedy_N: np.ndarray | None = None
    """Reward of the greedy completion of the same prompt."""
    turns: Turns | None = None
    """Of an environment's trajectories."""
    turn_rewards_NT: np.ndarray | None = None
    """The part of the totals that turns were given, weighted, on the last token of each; None: all are of the last."""

    def __getitem__(self, rows: Sequence[int]) -> Scored:
        parts: list[Any] = [x if x is None else x[rows] for x in vars(self).values()]
        return Scored(*parts)

    @property
    def mask_NT(self) -> np.ndarray:
        """`mask` as a new array."""
        return self.mask.dense()

    @property
    def rewards_N(self) -> jax.Array:
        """One reward a completion: its total less the KL of all its tokens."""
        return jnp.asarray(sequence_rewards(self.totals_N, self.penalty.sums_N[:, None]), real())

    @property
    def rewards_NT(self) -> jax.Array:
        """Rewards per token: minus the KL on each, plus the total, or the rest of it after turns, on the last (R12)."""
        totals = jnp.asarray(self.totals_N, real())
        penalty, mask = jnp.asarray(self.penalty.dense(), real()), jnp.asarray(self.mask_NT)
        if self.turn_rewards_NT is None:
            return token_rewards(totals, penalty, mask)
        of_turns = jnp.asarray(self.turn_rewards_NT, real())
        return of_turns + token_rewards(totals - of_turns.sum(-1), penalty, mask)


Surrogate = Callable[[Terms], tuple[jax.Array, Metrics]]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """How scored rollouts become a loss. The objective adds importance weights, KL and entropy to the surrogate."""

    advantages: Callable[[Scored], jax.Array | Column]
    """Of every completion [N], or of every token, as an array [N, T] or a column."""
    surrogate: Surrogate
    """Loss of every token [C, T], 0 where masked, and sums for metrics, as in `rlhf.tuning.losses.policy`, or none."""
    keep: Callable[[Scored], np.ndarray] | None = None
    """Which completions are trained on, [N] bool; None: `informative`, and the rest as `tied_groups` says."""
    paired: bool = False
    """Whether `keep` leaves two completions of a prompt, which are then packed in slots 2b and 2b + 1."""
    signal: Callable[[Scored], np.ndarray] | None = None
    """Where `keep` is None, which completions have an advantage, [N] bool; None: `informative`."""
    mark: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    """Advantages and log pi_old of all tokens of a step -> 1 on those that the surrogate reads as `Terms.marked_CT`."""


def find(objective: Objective) -> Algorithm:
    """Return the objective's algorithm: a built-in one, or the result of the user's `module:function`.

    Raises ValueError for an unknown name, or a function that returns something else.
    """
    entry = registry.find(objective.algorithm)
    module, _, function = objective.algorithm.partition(":")
    place = f"rlhf.tuning.algorithms.{entry.module}" if entry else module
    if entry is None:
        check_module(module)
    try:
        # By name: the modules of algorithms import this one, and a round needs one of them.
        make = getattr(importlib.import_module(place), "algorithm" if entry else function)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"algorithm {objective.algorithm!r}: {e}") from e
    algorithm = make(objective, **objective.algorithm_arguments)
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"algorithm {objective.algorithm!r} returned {type(algorithm).__name__}, not an Algorithm")
    return algorithm


def informative(scored: Scored) -> np.ndarray:
    """Completions that carry a signal, [N] bool: valid, in a group whose whole rewards differ, the KL included (R9)."""
    return informative_groups(np.asarray(scored.rewards_N), scored.groups_N, scored.valid_N)


def every_valid(scored: Scored) -> np.ndarray:
    """All valid completions: for algorithms whose baseline is not the group's."""
    return scored.valid_N


def group_relative(normalisation: Normalisation) -> Callable[[Scored], jax.Array]:
    """Rewards against the mean of their group, [N]; statistics over whole groups, failed samples excluded (R9)."""
    return lambda scored: group_advantages(
        scored.rewards_N, scored.groups_N, normalisation=normalisation, valid=scored.valid_N
    )


def clipped(objective: Objective) -> Surrogate:
    """PPO's clipped surrogate with the objective's range, and the kind of ratio that the registry names."""
    o, ratio = objective, objective.entry.ratio if objective.entry else "token"
    return functools.partial(
        clipped_surrogate, clip_low=o.clip_low, clip_high=o.clip_high, dual_clip=o.dual_clip, ratio=ratio
    )

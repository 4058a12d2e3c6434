"""Which groups of completions carry a signal: the one rule of refills, of scores and of updates.

Axes: N completions of a round; a group is the completions of one prompt. Needs NumPy alone, so that a stage can ask
before it loads JAX.
"""

from collections.abc import Sequence

import numpy as np

LEAST_SPREAD = np.float32(1e-6)
"""Smallest range of a group's rewards at which the group is trained on; below it a group-relative advantage is 0 or
rounding."""


def is_informative(rewards: Sequence[float] | np.ndarray) -> bool:
    """Whether the rewards of one group's valid completions differ, at least two of them given.

    Compared as float32, in which score tables store them, so that every stage decides alike.
    """
    values = np.asarray(rewards, np.float32)
    return len(values) > 1 and bool(np.ptp(values) >= LEAST_SPREAD)


def informative_groups(rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray) -> np.ndarray:
    """Valid completions of informative groups, [N] bool; those that are not valid decide nothing."""
    keep_N = np.zeros(len(rewards_N), bool)
    for group in np.unique(groups_N):
        mine_N = (groups_N == group) & valid_N
        if is_informative(rewards_N[mine_N]):
            keep_N |= mine_N
    return keep_N

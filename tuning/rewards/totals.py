"""One total for each completion from several rewards.

Axes: B completions of the round, F rewards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np

from tuning.algorithms.advantages import group_advantages, standardise
from tuning.rewards.samples import Outcome

Normalise = Literal["none", "group", "batch"]
OnFailure = Literal["drop", "zero", "stop"]
Unscored = Literal["drop", "zero"]


class RewardFailed(RuntimeError):
    """A reward with `on_failure: stop` failed."""


@dataclasses.dataclass(frozen=True)
class Part:
    """How one reward enters the total: squashed, clipped, normalised and weighted, in this order."""

    name: str
    weight: float = 1.0
    squash: Literal["none", "sigmoid"] = "none"
    clip: tuple[float, float] | None = None
    """Smallest and largest value."""
    normalise: Normalise = "none"
    """Over the values of a prompt's completions, or over the round."""
    on_failure: OnFailure = "drop"
    """The sample leaves the round, the reward counts as 0, or the run ends."""


def shaped(value: float, part: Part) -> float:
    """The value after squash and clip, in that order."""
    if part.squash == "sigmoid":
        value = _sigmoid(value)
    if part.clip is not None:
        low, high = part.clip
        value = min(max(value, low), high)
    return value


def _sigmoid(value: float) -> float:
    # exp overflows for large arguments, so its argument is negative on either side.
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))


def totals(
    columns: Sequence[Sequence[Outcome]], parts: Sequence[Part], groups_B: Sequence[int], unscored: Unscored = "drop"
) -> tuple[np.ndarray, list[str | None]]:
    """Weighted sums [B] float32, NaN where the sample is dropped, and the failures of each sample.

    columns: for each part the outcome of every completion, with its shaped value. A reward with `normalise` is centred
    and scaled over the group or the round first (GDPO, arXiv:2601.05242). A reward that does not apply adds nothing. A
    failed one drops its sample, counts as 0, or raises RewardFailed, according to its `on_failure`. A sample to which
    no reward applies is dropped or has a total of 0, as `unscored` says.
    """
    dropped_B = np.zeros(len(groups_B), bool)
    for column, part in zip(columns, parts, strict=True):
        dropped_B |= _drops(column, part)
    if unscored == "drop":
        dropped_B |= ~np.asarray([any(outcome.applies for outcome in row) for row in zip(*columns, strict=True)], bool)
    sums_B = np.where(dropped_B, np.nan, 0.0)
    failures: list[list[str]] = [[] for _ in groups_B]
    for column, part in zip(columns, parts, strict=True):
        sums_B += _weighted(column, part, groups_B, dropped_B)
        for causes, outcome in zip(failures, column, strict=True):
            if outcome.failure is not None:
                causes.append(f"{part.name}: {outcome.failure}")
    return sums_B.astype(np.float32), ["; ".join(causes) or None for causes in failures]


def _drops(column: Sequence[Outcome], part: Part) -> np.ndarray:
    """Which samples leave because this reward failed, [B] bool. Raises RewardFailed where that ends the run."""
    failed_B = np.asarray([outcome.failure is not None for outcome in column], bool)
    if part.on_failure == "stop" and failed_B.any():
        first = int(failed_B.argmax())
        raise RewardFailed(f"reward {part.name} failed on completion {first} of the round: {column[first].failure}")
    return failed_B & (part.on_failure == "drop")


def _weighted(column: Sequence[Outcome], part: Part, groups_B: Sequence[int], dropped_B: np.ndarray) -> np.ndarray:
    """What one reward adds to the totals, [B] float64."""
    values_B = np.asarray([np.nan if outcome.value is None else outcome.value for outcome in column], np.float64)
    # A failure that counts as 0 also enters the statistics below. A dropped sample enters none, that of a reward which
    # has a value for it included (R24).
    values_B[[outcome.failure is not None for outcome in column]] = 0.0
    known_B = np.isfinite(values_B) & ~dropped_B
    if part.normalise != "none":
        values_B[known_B] = _normalised(values_B, known_B, groups_B, part.normalise)[known_B]
    return np.where(known_B, part.weight * values_B, 0.0)


def _normalised(values_B: np.ndarray, known_B: np.ndarray, groups_B: Sequence[int], how: Normalise) -> np.ndarray:
    """The known values centred and scaled over their group or the round, [B] float32."""
    # Unknown values are masked, but NaN * 0 would still be NaN.
    values = jnp.asarray(np.where(known_B, values_B, 0.0), jnp.float32)
    known = jnp.asarray(known_B)
    if how == "batch":
        return np.asarray(standardise(values, valid=known, eps=1e-4))
    return np.asarray(group_advantages(values, jnp.asarray(groups_B), valid=known))

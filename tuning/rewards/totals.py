"""One total for each completion from several rewards.

Axes: B completions of the round, F rewards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np

from rlhf.tuning.algorithms.advantages import group_advantages
from rlhf.tuning.rewards.samples import Outcome

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


LARGEST = 1e15
"""Largest weighted value: squares of the totals of a round are float32, and where one is infinite its group, or the
round, has no advantage left."""


def bounded(outcome: Outcome, part: Part) -> Outcome:
    """The outcome; a failure where its value after squash and clip is beyond `LARGEST`."""
    value = 0.0 if outcome.value is None else shaped(outcome.value, part)
    if max(1.0, abs(part.weight)) * abs(value) <= LARGEST:
        return outcome
    return Outcome(None, f"{value:g} with weight {part.weight:g} is beyond {LARGEST:g}: clip it, or lower its weight")


def _sigmoid(value: float) -> float:
    # exp overflows for large arguments, so its argument is negative on either side.
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))


Scale = tuple[float, float]
"""Mean and standard deviation of a reward over the round."""
EPS = 1e-4
"""Added to standard deviations."""
EQUAL = 1e-9
"""Values whose range is no larger share of the largest of them are equal."""


def totals(
    columns: Sequence[Sequence[Outcome]],
    parts: Sequence[Part],
    groups_B: Sequence[int],
    unscored: Unscored = "drop",
    scales: Mapping[str, Scale] | None = None,
) -> tuple[np.ndarray, list[str | None]]:
    """Weighted sums [B] float32, NaN where the sample is dropped, and the failures of each sample.

    columns: for each part the outcome of every completion, with its shaped value. A reward with `normalise` is centred
    and scaled over the group or the round first (GDPO, arXiv:2601.05242). A reward that does not apply adds nothing. A
    failed one drops its sample, counts as 0, or raises RewardFailed, according to its `on_failure`. A sample to which
    no reward applies is dropped or has a total of 0, as `unscored` says.

    scales: for rewards that are normalised over the batch, by name, the mean and deviation of the round that these
    completions belong to (`scales_of`); without them those of the completions themselves.
    """
    dropped_B = _dropped(columns, parts, unscored)
    scales = scales_of(columns, parts, unscored) if scales is None else scales
    sums_B = np.where(dropped_B, np.nan, 0.0)
    failures: list[list[str]] = [[] for _ in groups_B]
    for column, part in zip(columns, parts, strict=True):
        sums_B += _weighted(column, part, groups_B, dropped_B, scales.get(part.name))
        for causes, outcome in zip(failures, column, strict=True):
            if outcome.failure is not None:
                causes.append(f"{part.name}: {outcome.failure}")
    return sums_B.astype(np.float32), ["; ".join(causes) or None for causes in failures]


def scales_of(
    columns: Sequence[Sequence[Outcome]], parts: Sequence[Part], unscored: Unscored = "drop"
) -> dict[str, Scale]:
    """Mean and standard deviation of the rewards that are normalised over the batch, by name, for `totals`.

    Rewards that do not differ have a deviation of 1: values of another sampling are then only centred.
    """
    dropped_B = _dropped(columns, parts, unscored)
    scales = {}
    for column, part in zip(columns, parts, strict=True):
        if part.normalise == "batch":
            values_B = _values(column)
            scales[part.name] = _scale(values_B[np.isfinite(values_B) & ~dropped_B])
    return scales


def _scale(values: np.ndarray) -> Scale:
    if not len(values):
        return 0.0, 1.0
    # The mean of equal values may be another number than they, and so may values that are equal but for rounding.
    least = values.min()
    mean = float(least + (values - least).mean())
    differ = np.ptp(values) > EQUAL * np.abs(values).max()
    return mean, float((values - least).std(ddof=1)) if differ else 1.0


def _dropped(columns: Sequence[Sequence[Outcome]], parts: Sequence[Part], unscored: Unscored) -> np.ndarray:
    """Which samples leave: a reward failed, or none applies; [B] bool. Raises RewardFailed where that ends the run."""
    applies = [any(outcome.applies for outcome in row) for row in zip(*columns, strict=True)]
    dropped_B = ~np.asarray(applies, bool) & (unscored == "drop")
    for column, part in zip(columns, parts, strict=True):
        failed_B = np.asarray([outcome.failure is not None for outcome in column], bool)
        if part.on_failure == "stop" and failed_B.any():
            first = int(failed_B.argmax())
            cause = column[first].failure
            raise RewardFailed(f"reward {part.name} failed on completion {first} of the round: {cause}")
        dropped_B |= failed_B & (part.on_failure == "drop")
    return dropped_B


def _values(column: Sequence[Outcome]) -> np.ndarray:
    """The values of a reward, [B] float64: 0 where it failed, NaN where it does not apply."""
    values_B = np.asarray([np.nan if outcome.value is None else outcome.value for outcome in column], np.float64)
    values_B[[outcome.failure is not None for outcome in column]] = 0.0
    return values_B


def _weighted(
    column: Sequence[Outcome], part: Part, groups_B: Sequence[int], dropped_B: np.ndarray, scale: Scale | None
) -> np.ndarray:
    """The contribution of one reward to the totals, [B] float64."""
    values_B = _values(column)
    # A failure that counts as 0 enters the statistics. A dropped sample enters none, those of a reward which has a
    # value for it included (R24).
    known_B = np.isfinite(values_B) & ~dropped_B
    if scale is not None:
        values_B = (values_B - scale[0]) / (scale[1] + EPS)
    elif part.normalise == "group":
        # Less the least of the group before they are rounded: 1e6 + 0.01 is 1e6 in float32.
        _, numbers_B = np.unique(groups_B, return_inverse=True)
        least_G = np.full(len(values_B), np.inf)
        np.minimum.at(least_G, numbers_B[known_B], values_B[known_B])
        # Unknown values are masked, but NaN * 0 would still be NaN.
        values = jnp.asarray(np.where(known_B, values_B - least_G[numbers_B], 0.0), jnp.float32)
        normed = group_advantages(values, jnp.asarray(groups_B), valid=jnp.asarray(known_B), eps=EPS)
        values_B[known_B] = np.asarray(normed)[known_B]
    return np.where(known_B, part.weight * values_B, 0.0)

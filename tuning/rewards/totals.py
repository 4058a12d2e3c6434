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

from tuning.algorithms.advantages import group_advantages
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


Scale = tuple[float, float]
"""Mean and standard deviation of a reward over the round."""
EPS = 1e-4
"""Added to standard deviations."""


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
    scales = scales_of(columns, parts) if scales is None else scales
    sums_B = np.zeros(len(groups_B), np.float64)
    failures: list[list[str]] = [[] for _ in groups_B]
    for column, part in zip(columns, parts, strict=True):
        sums_B += _weighted(column, part, groups_B, scales.get(part.name))
        for causes, outcome in zip(failures, column, strict=True):
            if outcome.failure is not None:
                causes.append(f"{part.name}: {outcome.failure}")
    if unscored == "drop":
        applies_B = [
            any(o.value is not None or o.failure is not None for o in row) for row in zip(*columns, strict=True)
        ]
        sums_B[~np.asarray(applies_B, bool)] = np.nan
    # NaN + anything is NaN: one reward that drops a sample drops it from the total.
    return sums_B.astype(np.float32), ["; ".join(causes) or None for causes in failures]


def scales_of(columns: Sequence[Sequence[Outcome]], parts: Sequence[Part]) -> dict[str, Scale]:
    """Mean and standard deviation of the rewards that are normalised over the batch, by name, for `totals`.

    Rewards that do not differ have a deviation of 1: values of another sampling are then only centred.
    """
    scales = {}
    for column, part in zip(columns, parts, strict=True):
        if part.normalise == "batch":
            values_B = _known(column, part)
            values_B = values_B[np.isfinite(values_B)]
            deviation = float(values_B.std(ddof=1)) if len(values_B) > 1 else 0.0
            scales[part.name] = (float(values_B.mean()) if len(values_B) else 0.0, deviation or 1.0)
    return scales


def _known(column: Sequence[Outcome], part: Part) -> np.ndarray:
    """The values of a reward, [B] float64; NaN where it does not apply or its failure drops the sample."""
    failed_B = np.asarray([outcome.failure is not None for outcome in column], bool)
    values_B = np.asarray([np.nan if outcome.value is None else outcome.value for outcome in column], np.float64)
    # A failure that counts as 0 also enters the statistics; a dropped sample does not.
    values_B[failed_B] = 0.0 if part.on_failure == "zero" else np.nan
    return values_B


def _weighted(column: Sequence[Outcome], part: Part, groups_B: Sequence[int], scale: Scale | None) -> np.ndarray:
    """What one reward adds to the totals, [B] float64; NaN drops the sample."""
    failed_B = np.asarray([outcome.failure is not None for outcome in column], bool)
    if part.on_failure == "stop" and failed_B.any():
        first = int(failed_B.argmax())
        raise RewardFailed(f"reward {part.name} failed on completion {first} of the round: {column[first].failure}")
    values_B = _known(column, part)
    known_B = np.isfinite(values_B)
    if scale is not None:
        values_B = (values_B - scale[0]) / (scale[1] + EPS)
    elif part.normalise == "group":
        # Unknown values are masked, but NaN * 0 would still be NaN.
        values = jnp.asarray(np.where(known_B, values_B, 0.0), jnp.float32)
        normed = group_advantages(values, jnp.asarray(groups_B), valid=jnp.asarray(known_B), eps=EPS)
        values_B[known_B] = np.asarray(normed)[known_B]
    added_B = part.weight * np.where(known_B, values_B, 0.0)
    if part.on_failure == "drop":
        added_B[failed_B] = np.nan
    return added_B

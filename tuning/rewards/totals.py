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

Normalise = Literal["none", "group", "batch"]
OnFailure = Literal["drop", "zero", "stop"]


class RewardFailed(RuntimeError):
    """A reward failed whose settings ask the run to stop."""


@dataclasses.dataclass(frozen=True)
class Part:
    """How one reward enters the total."""

    name: str
    weight: float = 1.0
    squash: Literal["none", "sigmoid"] = "none"
    clip: tuple[float, float] | None = None
    normalise: Normalise = "none"
    on_failure: OnFailure = "drop"


def shaped(value: float, part: Part) -> float:
    """The value after squash and clip, in that order."""
    if part.squash == "sigmoid":
        # Without overflow on either side.
        value = 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
    return value if part.clip is None else min(max(value, part.clip[0]), part.clip[1])


def totals(
    columns: Sequence[Sequence[tuple[float | None, str | None]]], parts: Sequence[Part], groups_B: Sequence[int]
) -> tuple[np.ndarray, list[str | None]]:
    """Weighted sums [B] float32, NaN where a failed reward drops the sample, and the failures of each sample.

    columns: for each part the (shaped value, failure) of every completion; (None, None) where the reward does not
    apply, which then adds nothing. A reward with `normalise` is centred and scaled over the group or the round first
    (GDPO, arXiv:2601.05242). A failed one drops its sample, counts as 0, or raises RewardFailed, as the part says.
    """
    found = np.zeros(len(groups_B), np.float64)
    failures: list[list[str]] = [[] for _ in groups_B]
    for column, part in zip(columns, parts, strict=True):
        values = np.asarray([np.nan if v is None else v for v, _ in column], np.float64)
        for i, (_, failure) in enumerate(column):
            if failure is None:
                continue
            if part.on_failure == "stop":
                raise RewardFailed(f"reward {part.name} failed on completion {i} of the round: {failure}")
            failures[i].append(f"{part.name}: {failure}")
            values[i] = 0.0 if part.on_failure == "zero" else np.nan
        known = np.isfinite(values)
        if part.normalise != "none":
            values[known] = _normalised(values, known, groups_B, part.normalise)[known]
        found += part.weight * np.where(known, values, 0.0)
        dropped = [f is not None and part.on_failure == "drop" for _, f in column]
        found[np.asarray(dropped, bool)] = np.nan
    return found.astype(np.float32), ["; ".join(f) or None for f in failures]


def _normalised(values_B: np.ndarray, known_B: np.ndarray, groups_B: Sequence[int], how: Normalise) -> np.ndarray:
    x, valid = jnp.asarray(np.where(known_B, values_B, 0.0), jnp.float32), jnp.asarray(known_B)
    if how == "batch":
        return np.asarray(standardise(x, valid=valid, eps=1e-4))
    return np.asarray(group_advantages(x, jnp.asarray(groups_B), valid=valid))

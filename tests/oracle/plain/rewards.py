"""From outcomes of rewards to the total of each completion, and what fails.

An outcome is (value, failure): a number, or why there is none; both None where the reward does not apply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Outcome = tuple[float | None, str | None]


class Stopped(Exception):
    """A reward failed whose settings end the run."""


def _shaped(value: float, part: Mapping[str, Any]) -> float:
    if part["squash"] == "sigmoid":
        value = 1 / (1 + math.exp(-value)) if value > -700 else 0.0
    return value if part["clip"] is None else min(max(value, part["clip"][0]), part["clip"][1])


def _centred(values: list[float | None], groups: Sequence[int], how: str) -> list[float | None]:
    """Known values with mean 0 and deviation 1, of a group or of the round (GDPO, arXiv:2601.05242)."""
    found = list(values)
    for group in dict.fromkeys(groups) if how == "group" else [None]:
        at = [i for i, v in enumerate(values) if v is not None and group in (None, groups[i])]
        known = [float(values[i]) for i in at]  # type: ignore[arg-type]
        spread = float(np.std(known, ddof=1)) if len(known) > 1 else 0.0
        for i, x in zip(at, known, strict=True):
            found[i] = (x - sum(known) / len(known)) / (spread + 1e-4)
    return found


def totals(
    parts: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Sequence[Outcome]], groups: Sequence[int]
) -> list[float | None]:
    """The weighted sum for each completion; None where a failed reward drops it, or where none of them applies."""
    count = len(groups)
    sums, dropped, applies = [0.0] * count, [False] * count, [False] * count
    for name, part in parts.items():
        values: list[float | None] = []
        for i, (value, failure) in enumerate(columns[name]):
            # Not a number is a failure as well (R24).
            failed = failure is not None or (value is not None and math.isnan(value))
            if failed and part["on_failure"] == "stop":
                raise Stopped(f"{name} on completion {i}")
            dropped[i] |= failed and part["on_failure"] == "drop"
            applies[i] |= failed or value is not None
            if failed:
                values.append(0.0 if part["on_failure"] == "zero" else None)
            else:
                values.append(None if value is None else _shaped(value, part))
        if part["normalise"] != "none":
            values = _centred(values, groups, part["normalise"])
        sums = [total + part["weight"] * (v or 0.0) for total, v in zip(sums, values, strict=True)]
    return [None if dropped[i] or not applies[i] else sums[i] for i in range(count)]

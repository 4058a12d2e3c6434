"""From outcomes of rewards to the total of each completion, and what fails.

An outcome is (value, failure): a number, or why there is none; both None where the reward does not apply.
"""

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
    parts: Mapping[str, Mapping[str, Any]],
    columns: Mapping[str, Sequence[Outcome]],
    groups: Sequence[int],
    unscored: str = "drop",
) -> list[float | None]:
    """The weighted sum for each completion; None where a failed reward drops it, or where none of them applies."""
    count = range(len(groups))
    failed = {n: [_failed(o) for o in column] for n, column in columns.items()}
    for name, part in parts.items():
        if part["on_failure"] == "stop" and any(failed[name]):
            raise Stopped(f"{name} on completion {failed[name].index(True)}")
    dropped = [any(failed[n][i] and part["on_failure"] == "drop" for n, part in parts.items()) for i in count]
    applies = [any(failed[n][i] or columns[n][i][0] is not None for n in parts) for i in count]
    if unscored == "drop":
        dropped = [gone or not some for gone, some in zip(dropped, applies, strict=True)]
    sums = [0.0] * len(groups)
    for name, part in parts.items():
        values: list[float | None] = []
        for i, (value, _) in enumerate(columns[name]):
            if dropped[i]:
                # Who is dropped by one reward is in the statistics of none (R24).
                values.append(None)
            elif failed[name][i]:
                values.append(0.0)
            else:
                values.append(None if value is None else _shaped(value, part))
        if part["normalise"] != "none":
            values = _centred(values, groups, part["normalise"])
        sums = [total + part["weight"] * (v or 0.0) for total, v in zip(sums, values, strict=True)]
    return [None if gone else total for gone, total in zip(dropped, sums, strict=True)]


def _failed(outcome: Outcome) -> bool:
    """Whether there is a failure; not a number is one as well."""
    return outcome[1] is not None or (outcome[0] is not None and math.isnan(outcome[0]))

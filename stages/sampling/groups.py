"""Groups of scored completions: which teach something, and which of them a round takes."""

from __future__ import annotations

import math
from typing import Any

LEAST_SHARE = 0.25
"""A refill expects at least this share of its prompts to be informative: it stays small."""


class TooFewGroups(RuntimeError):
    """All refills together left fewer informative groups than the round wants."""


def by_prompt(rollouts: list[dict[str, Any]], scores: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The totals of each prompt's completions, those of failed rewards left out."""
    found: dict[str, list[float]] = {}
    for row, score in zip(rollouts, scores, strict=True):
        mine = found.setdefault(row["prompt_id"], [])
        if score["total"] is not None:
            mine.append(score["total"])
    return found


def informative(totals: list[float]) -> bool:
    """Whether a group teaches anything (R9)."""
    from tuning.losses.groups import is_informative

    return is_informative(totals)


def chosen_groups(
    rollouts: list[dict[str, Any]], scores: list[dict[str, Any]], wanted: int, when_short: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Rows of the first `wanted` informative groups, and what became of each prompt.

    Raises TooFewGroups with the histogram of pass rates where there are fewer and `when_short` is `stop`.
    """
    groups = by_prompt(rollouts, scores)
    good = [p for p, totals in groups.items() if informative(totals)]
    if len(good) < wanted and when_short == "stop":
        raise TooFewGroups(
            f"{len(good)} of the {wanted} groups that the round wants are informative, after {len(groups)} prompts; "
            f"prompts by share of better completions, 0 to 1: {_histogram(groups)}. Use prompts that are neither too "
            "hard nor too easy, raise rl.refills or rl.rollout.completions, or set rl.update.short_of_groups: train"
        )
    taken = set(good[:wanted])
    keep = [i for i, r in enumerate(rollouts) if r["prompt_id"] in taken]
    about = {
        "prompts_sampled": len(groups),
        "prompts_without_signal": len(groups) - len(good),
        "prompts_to_spare": len(good) - len(taken),
    }
    return [rollouts[i] for i in keep], [scores[i] for i in keep], about


def _histogram(groups: dict[str, list[float]], bins: int = 5) -> list[int]:
    totals = [t for mine in groups.values() for t in mine]
    counts = [0] * bins
    middle = (min(totals) + max(totals)) / 2 if totals else 0.0
    for mine in groups.values():
        if mine:
            counts[min(bins - 1, int(sum(t > middle for t in mine) / len(mine) * bins))] += 1
    return counts


def missing_prompts(groups: dict[str, list[float]], wanted: int) -> int:
    """How many new prompts are worth sampling, from the share that was informative so far; at most `wanted`."""
    good = sum(map(informative, groups.values()))
    share = max(good / max(len(groups), 1), LEAST_SHARE)
    return min(wanted, math.ceil(max(wanted - good, 0) / share))

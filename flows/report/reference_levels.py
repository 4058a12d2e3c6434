"""Success in an environment without learning, next to the policies: chance, and play without observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rlhf.flows.report.formats import LABELS


class Level(NamedTuple):
    """A success that needs no model."""

    title: str
    value: float
    note: str


def levels_of(metrics: Mapping[str, Any]) -> list[Level]:
    """Return the levels of an evaluation in ascending order; none if its environment has none."""
    levels = metrics.get("levels")
    if not levels:
        return []
    bound = "" if levels.get("exact", True) else "; a lower bound, the best that a bounded search found"
    blind = f"one sequence of actions for all tasks, chosen for these{bound}"
    rows = [
        ("random moves", levels["random"], "expected success of valid actions at random"),
        ("best without looking", levels["blind"], blind),
        ("at best", levels.get("optimal"), "of a policy that uses all observations"),
    ]
    return [Level(title, value, note) for title, value, note in rows if value is not None]


def level_notes(evaluations: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Say whether the last policy uses its observations, and whether success is a guess.

    The level is of exactly the evaluated tasks, so the score's interval is compared with a number.
    """
    notes = []
    label, metrics = list(evaluations.items())[-1] if evaluations else ("", {})
    if levels := metrics.get("levels"):
        title, blind = LABELS.get(label, label), levels["blind"]
        numbers = (
            f"{metrics['score']:.3f} [{metrics['score_low']:.3f}, {metrics['score_high']:.3f}] against {blind:.3f}"
        )
        if not levels.get("exact", True):
            numbers += ", which is a lower bound"
        if metrics["score_low"] > blind:
            notes.append(f"{title} is above a policy that does not look ({numbers}): it uses its observations.")
        elif metrics["score_high"] < blind:
            notes.append(f"{title} is below a policy that does not look ({numbers}).")
        elif blind >= 1:
            notes.append(f"A policy that does not look solves all of these tasks ({numbers}): use harder ones.")
        else:
            notes.append(f"{title} may be a policy that does not look ({numbers}): more tasks would tell.")
    if any(metrics.get("success_guessed") for metrics in evaluations.values()):
        notes.append(
            'Success is a guess here: the environment does not set `info["success"]`, so an episode counts if it ended '
            "by itself with a positive reward of the last turn."
        )
    return notes

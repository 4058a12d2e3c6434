"""What an environment's success is without learning, beside the policies: chance, and play without looking."""

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
    """The levels of an evaluation in ascending order of what they need; none where its environment tells none."""
    found = metrics.get("levels")
    if not found:
        return []
    bound = "" if found.get("exact", True) else "; a lower bound, the best that a bounded search found"
    levels = [
        Level("random moves", found["random"], "expected success of valid actions at random"),
        Level(
            "best without looking", found["blind"], f"one sequence of actions for all tasks, chosen for these{bound}"
        ),
    ]
    if found.get("optimal") is not None:
        levels.append(Level("at best", found["optimal"], "of a policy that uses all that the environment tells"))
    return levels


def guess(evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    """That the share of successes is a guess, in a sentence; empty where environments have told all of them."""
    if not any(metrics.get("success_guessed") for metrics in evaluations.values()):
        return ""
    return (
        'Success is a guess here: the environment does not say `info["success"]`, so an episode counts that it has '
        "ended itself with a positive reward of the last turn."
    )


def verdict(label: str, metrics: Mapping[str, Any]) -> str:
    """Whether a policy is above what one reaches that does not look, in a sentence; empty without levels.

    The level is of exactly the evaluated tasks, so the comparison is that of the score's interval with a number.
    """
    found = metrics.get("levels")
    if not found:
        return ""
    title, blind = LABELS.get(label, label), found["blind"]
    numbers = f"{metrics['score']:.3f} [{metrics['score_low']:.3f}, {metrics['score_high']:.3f}] against {blind:.3f}"
    if not found.get("exact", True):
        numbers += ", which is a lower bound"
    if metrics["score_low"] > blind:
        return f"{title} is above what a policy reaches that does not look ({numbers}): it uses what it observes."
    if metrics["score_high"] < blind:
        return f"{title} is below what a policy reaches that does not look ({numbers})."
    if blind >= 1:
        return f"A policy that does not look solves all of these tasks ({numbers}): they cannot show that it looks."
    return f"{title} cannot be told from a policy that does not look ({numbers}): more tasks would tell."

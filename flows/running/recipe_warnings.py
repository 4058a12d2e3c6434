"""Warnings about settings with effects that are rarely intended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.running.checks import check_columns, unanswered
from rlhf.stages.prepare.preview import faults


def of_recipe(recipe: Recipe) -> list[str]:
    """Return warnings about settings and about the first records of data sources."""
    rl, lines = recipe.rl, list(faults(recipe.data))
    # Rescored rollouts were sampled by another run.
    if rl is None or rl.rollouts_from is not None or not rl.staleness:
        return lines
    if rl.rounds == 1:
        lines.append(f"rl.staleness {rl.staleness} changes nothing: rl.rounds is 1, and there is no earlier policy")
    elif rl.staleness >= rl.rounds - 1:
        lines.append(
            f"rl.staleness {rl.staleness} with rl.rounds {rl.rounds}: every round samples from the policy that RL "
            f"starts from; to sample from trained ones too, set the former to {max(0, rl.rounds - 2)} or less"
        )
    if rl.update.old_logps != "trainer":
        lines.append(
            f"rl.staleness {rl.staleness} with rl.update.old_logps sampler: ratios are to the older policies that "
            "sampled, so that clipping counts how far training has come since as if this round had moved there; with "
            "trainer weights correct for it"
        )
    return lines


def of_data(recipe: Recipe, metrics: Mapping[str, Any]) -> list[str]:
    """Return warnings about settings and the data. metrics: of the artifact of `prepare`."""
    rl, there = recipe.rl, metrics.get("rows", {}).get("prompts", 0)
    lines = [message for message, is_error in unanswered(recipe, metrics) if not is_error]
    try:
        # A run of a part of the recipe may not reach these stages.
        check_columns(recipe, metrics, ("score", "evaluate"))
    except RecipeError as e:
        lines.append(f"a run of the whole recipe ends after prepare: {e}")
    if rl is None or rl.rollouts_from is not None or not 0 < there < rl.rollout.prompts:
        return lines
    return [
        *lines,
        f"rl.rollout.prompts is {rl.rollout.prompts}, and the data has {there} prompts: a round draws some of them "
        "more than once, as groups of their own; lower it, or add data",
    ]

"""How rewards of an environment count in the totals of a recipe's rounds."""

from __future__ import annotations

from typing import Any

from stages.sampling.environment import ENVIRONMENT
from stages.score.settings import Config as ScoreConfig


def environment_weight(score: Any) -> float:
    """The weight of the environment's rewards in the totals of settings of the stage score, as written."""
    rewards = score.get("rewards") if isinstance(score, dict) else None
    parts = rewards.values() if isinstance(rewards, dict) else ()
    weights = [p.get("weight", 1.0) for p in parts if isinstance(p, dict) and p.get("function") == "environment"]
    return float(sum(weights)) if all(isinstance(w, int | float) for w in weights) else 0.0


def shape_of(score: ScoreConfig) -> str | None:
    """The setting by which the total counts something else than the sum of an environment's rewards; None if none."""
    for name, reward in score.rewards.items():
        if reward.function != ENVIRONMENT or not reward.weight:
            continue
        if score.truncated == "zero":
            return "truncated: zero"
        shapes = {"clip": reward.clip, "squash": reward.squash, "normalise": reward.normalise}
        if said := [shape for shape, value in shapes.items() if value not in (None, "none")]:
            return f"rewards.{name}.{said[0]}"
    return None

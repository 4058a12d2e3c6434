"""Reference levels of an environment: success without learning, and at best."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Levels:
    """Expected success over some tasks of policies that need no model. Chance moves count by their probabilities."""

    random: float
    """Of uniformly random valid actions."""
    blind: float
    """Of the best policy that sees no observation: one sequence of actions for all tasks, fitted to these tasks. A
    policy above it uses its observations."""
    optimal: float | None
    """Of the best policy that uses all observations; None if it is not computed."""
    exact: bool = True
    """False: `blind` is a lower bound, the best that a bounded search found."""


def check(name: str, argument: str, value: float, low: float, high: float) -> None:
    """Raises ValueError, naming environment and argument, for a value outside low..high."""
    if not low <= value <= high:
        raise ValueError(f"environment {name}: argument {argument} must be in {low}..{high}, got {value}")

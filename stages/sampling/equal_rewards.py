"""Rewards that tell no completions of a prompt apart: one that compares them may be called with each alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.tuning.rows import CompletionRow


def alike(values: Mapping[str, Sequence[float | None]], rollouts: Sequence[CompletionRow]) -> list[str]:
    """The rewards that tell no completions of a prompt apart, though their texts differ; none where no texts differ.

    values: of each reward by its name, one for each rollout.
    """
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rollouts):
        groups.setdefault(row.place, []).append(i)
    compared = [group for group in groups.values() if len({rollouts[i].text for i in group}) > 1]

    def ties(column: Sequence[float | None]) -> bool:
        # None is a failure, or a reward that does not apply.
        found = [{column[i] for i in group} - {None} for group in compared]
        return any(found) and all(len(numbers) <= 1 for numbers in found)

    return [name for name, column in values.items() if ties(column)]


def alone(names: Sequence[str]) -> str:
    """What to set where these rewards are alike in each group, called with one completion at a time, not with all."""
    rewards = " and ".join(f"“{name}”" for name in names)
    places = " and ".join(f"rl.score.rewards.{name}.batch: group" for name in names)
    return (
        f"{rewards} gave all completions of each prompt the same, as each call gets one of them (batch: sample); with "
        f"all of them in one call the values differ, which needs {places}"
    )

"""Which stage samples a round: `rollout`, or `partial` where completions go on from one round to the next."""

from __future__ import annotations

import json
from collections.abc import Sequence

from flows.recipe.model import RL
from flows.recipe.partial import carried_rounds, largest_lag
from stages.partial import Config
from stages.sampling.settings import Rollout

SEEDS = {"partial": "rollout"}
"""Stages with the seed of another: what is carried begins with the tokens that it would have had in one round."""


def carries(settings_of: Sequence[RL], number: int) -> bool:
    """Whether round `number` may leave completions to the next: the last round of its own run ends all of them.

    settings_of: those of each round, as they were made or are to be made. Before a fork they are of another run.
    """
    rl = settings_of[number]
    return rl.partial is not None and number + 1 < min(rl.rounds, len(settings_of))


def goes_on(settings_of: Sequence[RL], number: int) -> bool:
    """Whether round `number` goes on with completions of the round before."""
    return number > 0 and carries(settings_of, number - 1)


def is_first(settings_of: Sequence[RL], number: int) -> bool:
    """Whether the first long completions are still under way behind round `number`.

    Such rounds have few whole groups, and those of short completions. The one that ends all of them has the others.
    """
    if not carries(settings_of, number):
        return False
    began = number
    while goes_on(settings_of, began):
        began -= 1
    return number - began < carried_rounds(settings_of[number])


def idle_rounds(settings_of: Sequence[RL], number: int) -> int:
    """How many rounds in a row may teach nothing, of which round `number` is the last.

    Rounds in which the first long completions are under way do not count: that they have few groups says nothing of the
    rewards.
    """
    limit = settings_of[number].update.max_idle_rounds
    counted = free = 0
    for one in range(number, -1, -1):
        if is_first(settings_of, one):
            free += 1
        elif (counted := counted + 1) == limit:
            break
    return limit + free


def sampled_by(settings_of: Sequence[RL], number: int, sampling: Rollout) -> tuple[str, Rollout]:
    """The stage that samples round `number`, and its settings; `sampling` are those without carried completions."""
    rl, carried = settings_of[number], goes_on(settings_of, number)
    if rl.partial is None and not carried:
        return "rollout", sampling
    bound = rl if rl.partial is not None else settings_of[number - 1]
    lag = min(number, rl.staleness)
    partial = {
        "round_tokens": rl.partial.round_tokens if rl.partial is not None and carries(settings_of, number) else None,
        # Where nothing is carried any more the staleness has no bound but itself.
        "max_lag": max(largest_lag(bound), lag),
        "lag": lag,
        "carried": carried,
    }
    return "partial", Config.model_validate_json(json.dumps(sampling.model_dump(mode="json") | partial))

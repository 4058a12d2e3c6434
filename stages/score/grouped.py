"""Whether a function that is called with one completion at a time needs all of a prompt's: a few groups tell.

What it gives there is in no score.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.stages.contract.definition import Context
from rlhf.stages.sampling.episode_tables import FAILED, episodes_of, sample_of
from rlhf.stages.sampling.equal_rewards import alike
from rlhf.stages.score.settings import Config, Reward
from rlhf.tuning.rewards.samples import Outcome
from rlhf.tuning.rows import CompletionRow

TRIED = 3
"""Groups that a function is called with."""


def comparing(ctx: Context, columns: Mapping[str, Sequence[Outcome]], rollouts: Sequence[CompletionRow]) -> list[str]:
    """The user's functions that give the completions of each prompt the same one by one, and not in one call.

    columns: of each reward by its name, one for each rollout.
    """
    config: Config = ctx.config
    single = {name: [o.value for o in columns[name]] for name in columns if _is_single(config.rewards[name])}
    return [name for name in alike(single, rollouts) if _tells_apart(ctx, name, rollouts)]


def _is_single(reward: Reward) -> bool:
    """Whether it is a function of one's own that gets one completion a call."""
    return ":" in reward.function and reward.batch == "sample"


def _tells_apart(ctx: Context, name: str, rollouts: Sequence[CompletionRow]) -> bool:
    """Whether the function gives the completions of some prompt different values in one call."""
    groups = [group for group in _groups(rollouts) if len({rollouts[i].text for i in group}) > 1]
    found = _called(ctx, name, groups, rollouts)
    return any(len({outcome.value for outcome in group} - {None}) > 1 for group in found)


def hint(ctx: Context, columns: Mapping[str, Mapping[int, Outcome]], rollouts: Sequence[CompletionRow]) -> str:
    """What to add to an error of failed rewards: the functions that fail alone, and not with all of a prompt's.

    columns: of each reward by its name, by number of the rollout. Empty where there is no such function.
    """
    config: Config = ctx.config
    names = []
    for name, column in columns.items():
        # What works for some completions of a prompt alone does not need the others.
        lost = {number for number, outcome in column.items() if outcome.failure is not None}
        groups = [group for group in _groups(rollouts) if len(group) > 1 and lost.issuperset(group)]
        if _is_single(config.rewards[name]) and groups:
            found = _called(ctx, name, groups, rollouts)
            names += [name] if any(all(outcome.failure is None for outcome in group) for group in found) else []
    return "".join(
        f". With all completions of a prompt in one call {name} does not fail: rl.score.rewards.{name}.batch: group"
        for name in names
    )


def _groups(rollouts: Sequence[CompletionRow]) -> list[list[int]]:
    """Numbers of each prompt's completions that have an end."""
    groups: dict[int, list[int]] = {}
    for number, row in enumerate(rollouts):
        if row.stop != FAILED:
            groups.setdefault(row.place, []).append(number)
    return list(groups.values())


def _called(
    ctx: Context, name: str, groups: Sequence[Sequence[int]], rollouts: Sequence[CompletionRow]
) -> list[list[Outcome]]:
    """What the function gives for the first of these groups, each in one call."""
    from rlhf.tuning.rewards.processes import attempt

    reward: Reward = ctx.config.rewards[name]
    episodes = episodes_of(ctx.inputs["rollouts"])
    limits: dict[str, Any] = {"seconds": reward.seconds, "megabytes": reward.megabytes}
    samples = [sample_of(rollouts[i], episodes) for group in groups[:TRIED] for i in group]
    ends = list(itertools.accumulate(map(len, groups[:TRIED]), initial=0))
    calls = [range(start, end) for start, end in itertools.pairwise(ends)]
    outcomes = attempt(reward.function, reward.arguments, samples, calls=calls, workers=ctx.config.workers, **limits)
    return [[outcomes[k] for k in call] for call in calls]

"""Scores that are made ahead of their stage: finished shards of rollouts are scored while others are sampled.

What is kept are lines of the journals that the stage itself would write (`stages.common.journal`): a call is known by
all that the function sees of its completions, so a line is of use for these completions alone. They lie in a folder of
their own, until the stage takes them over. Failures are left to the stage, which tells them (R25), and so is what does
not go by prompts: functions that see the whole round, and the reward model, whose last bits depend on what is beside a
completion in its micro-batch. No stage imports this module, and its code is in no key: it calls what the stage calls.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from stages.common.journal import Journal, journaled
from stages.contract.definition import Context
from stages.sampling.played import FAILED
from stages.sampling.rows import FOLDER
from stages.score.settings import COMPUTED, Config, Reward
from stages.score.stage import SEEN
from stages.store.work import WorkFolder
from tuning.rows import CompletionRow, by_trajectory, read_table

LOOK_SECONDS = 0.2
"""How often it is looked for shards, in a folder of this host."""
TOTAL = re.compile(r"-of-(\d+)\.parquet$")
"""The number of shards in the name of a shard's file."""

Leave = Callable[[float], bool]
"""Whether the worker is wanted for something else, for which it waits so many seconds."""


def rewards_ahead(config: Config) -> dict[str, Reward]:
    """The rewards that are called ahead, by name: functions that get a completion, or those of one prompt."""
    named = sorted(config.rewards.items())
    return {name: r for name, r in named if r.function not in COMPUTED and r.batch != "round"}


def score_ahead(ctx: Context, sampled: WorkFolder, leave: Leave, check: Callable[[], None]) -> bool:
    """Scores the shards of rollouts as they are finished, until all are, or it is to leave; whether all are.

    ctx: of the score stage, without inputs; its work folder gets the journals. sampled: work of the stage that samples.
    leave: asked between calls, so that those under way come to their end: none is made twice.
    check: called behind each shard, raises where the code has changed by then.
    """
    scoring, seen, total = _Ahead(ctx, leave), set[str](), None
    while not leave(0.0):
        new = sorted(name for name in sampled.finished() - seen if name.startswith(f"{FOLDER}-"))
        for name in new:
            seen.add(name)
            files = sampled.files_of(name)
            total = total or _total(files)
            try:
                scoring.shard(files)
            finally:
                check()
            if scoring.leaves:
                return False
        if len(seen) == total:
            return True
        if not new and leave(LOOK_SECONDS):
            return False
    return False


def _total(files: Sequence[Path]) -> int | None:
    found = [TOTAL.search(path.name) for path in files]
    return next((int(match[1]) for match in found if match), None)


def take_over(ahead: Path, work: Path) -> None:
    """Adds the journals of a folder of scores made ahead to those of a stage's work folder, and removes it.

    A kill in its middle leaves lines twice at most, which are the same.
    """
    for path in sorted(ahead.glob("journal-*.jsonl")):
        if not (work / path.name).exists():
            path.rename(work / path.name)
            continue
        with path.open("rb") as lines, (work / path.name).open("ab") as mine:
            shutil.copyfileobj(lines, mine)
    shutil.rmtree(ahead, ignore_errors=True)


class _Ahead:
    """The rewards of one round, called shard by shard."""

    def __init__(self, ctx: Context, leave: Leave):
        # What it finds and how far it is, is no news: the stage says what it has reused.
        quiet = dataclasses.replace(ctx, log=lambda line: None)
        self._ctx, self._leave, self._config = ctx, leave, ctx.config
        self._rewards = rewards_ahead(ctx.config)
        self._journals = {name: Journal(quiet, f"reward {name}", f"journal-{name}") for name in self._rewards}
        self._made = dict.fromkeys(self._rewards, 0)
        self._failed = dict.fromkeys(self._rewards, 0)
        self.leaves = self._told = False

    def shard(self, files: Sequence[Path]) -> None:
        """Calls the rewards on a shard's completions; those of one that is gone, or that is damaged, are none."""
        try:
            table = read_table(files, CompletionRow, SEEN)
        except FileNotFoundError:
            # The rollouts are committed, or are being sampled anew.
            return
        rows = [parts[-1] for parts in by_trajectory(table)]
        if rows and not self._told:
            self._told = True
            self._ctx.log("finished shards of its rollouts are scored while others are sampled")
        for name, reward in self._rewards.items():
            self._reward(name, reward, rows, _calls(reward, rows))

    def _reward(self, name: str, reward: Reward, rows: Sequence[CompletionRow], calls: Sequence[Sequence[int]]) -> None:
        """Makes calls of a function that its journal has not, as many at a time as the stage would, until it is to
        leave."""
        from tuning.rewards.waiting import WAITS

        config = self._config
        at_once = config.max_concurrency if reward.function in WAITS else config.workers
        for start in range(0, len(calls), at_once):
            # One that fails more often than the stage bears costs no more time than that.
            if self._failed[name] > math.ceil(config.max_failed_fraction * self._made[name]):
                return
            self.leaves = self.leaves or self._leave(0.0)
            if self.leaves:
                return
            found = journaled(
                self._journals[name],
                rows,
                calls[start : start + at_once],
                reward.function,
                reward.arguments,
                seconds=reward.seconds,
                megabytes=reward.megabytes,
                workers=config.workers,
                max_concurrency=config.max_concurrency,
            )
            self._made[name] += len(found)
            self._failed[name] += sum(outcome.failure is not None for outcome in found.values())
            if any(outcome.is_outage for outcome in found.values()):
                # It is tried with the next shard; the stage says so where it lasts.
                return


def _calls(reward: Reward, rows: Sequence[CompletionRow]) -> list[list[int]]:
    """Numbers of the rows of each call, as the stage makes them: an episode without an end is in none."""
    groups: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        if row.stop != FAILED:
            groups.setdefault(row.place, []).append(number)
    return list(groups.values()) if reward.batch == "group" else [[i] for group in groups.values() for i in group]

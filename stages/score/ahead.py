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
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stages.common.journal import Journal, journaled
from stages.contract.definition import Context
from stages.sampling.played import FAILED
from stages.sampling.rows import FOLDER
from stages.score.settings import COMPUTED, Config, Reward
from stages.score.stage import SEEN
from stages.store.work import WorkFolder
from tuning.parallel.children import cores
from tuning.rewards.processes import WAITS
from tuning.rewards.samples import Outcome
from tuning.rows import CompletionRow, by_trajectory, read_table

LOOK_SECONDS = 0.5
"""How often it is looked for shards, in a folder of this host."""
TOTAL = re.compile(r"-of-(\d+)\.parquet$")
"""The number of shards in the name of a shard's file."""

Leave = Callable[[float], bool]
"""Whether the worker is wanted for something else, for which it waits so many seconds."""


def rewards_ahead(config: Config) -> dict[str, Reward]:
    """The rewards that are called ahead, by name: functions that get a completion, or those of one prompt."""
    named = sorted(config.rewards.items())
    return {name: r for name, r in named if r.function not in COMPUTED and r.batch != "round"}


def _total(files: Sequence[Path]) -> int:
    """How many shards there will be; 0 where no file tells."""
    found = [TOTAL.search(path.name) for path in files]
    return next((int(match[1]) for match in found if match), 0)


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


class _Checked(Journal):
    """A journal that gets a line only where the code is what the key names, and counts what has failed."""

    check: Callable[[], None]
    """Raises where it is not, or may not have been when a call was made."""
    outage = False
    """Whether a call of the shard that is being scored had no verdict."""

    def __init__(self, *of: Any):
        super().__init__(*of)
        self.failures = Counter[str]()
        """Completions that failed by themselves, by the reason."""

    def failed(self, outcomes: Sequence[Outcome]) -> None:
        self.outage = self.outage or any(outcome.is_outage for outcome in outcomes)
        self.failures.update(o.failure for o in outcomes if o.failure is not None and not o.is_outage)

    def add(self, rows: Sequence[CompletionRow], outcomes: Sequence[Outcome]) -> None:
        self.check()
        super().add(rows, outcomes)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Calls of a reward on a shard."""

    name: str
    rows: Sequence[CompletionRow]
    calls: Sequence[Sequence[int]]


class Scoring:
    """The rewards of one round, called shard by shard. It is left off and gone on with, and makes no call twice."""

    def __init__(self, ctx: Context, sampled: WorkFolder):
        """ctx: of the score stage, without inputs; its work folder gets the journals. sampled: work of the stage that
        samples."""
        # What it finds and how far it is, is no news: the stage says what it has reused.
        quiet = dataclasses.replace(ctx, log=lambda line: None)
        self._ctx, self._sampled, self._config = ctx, sampled, ctx.config
        self.work = ctx.work
        self._rewards = rewards_ahead(ctx.config)
        """Without those that are left to the stage."""
        self._journals = {name: _Checked(quiet, f"reward {name}", f"journal-{name}") for name in self._rewards}
        self._todo: deque[_Piece] = deque()
        """Of the shard that was read last."""
        self._finished: deque[str] = deque()
        """Shards that are to be read."""
        self._seen, self._total = set[str](), 0
        self._read, self._completions = 0, 0
        """Shards and their completions so far."""

    def go_on(self, leave: Leave, check: Callable[[], None]) -> bool:
        """Scores shards as they are finished, until all are, or it is to leave; whether nothing is left to do.

        leave: asked between calls.
        check: called before a value is kept, raises where it may be of other code.
        """
        for journal in self._journals.values():
            journal.check = check
        while not leave(0.0):
            if self._todo:
                self._call(self._todo.popleft())
            elif 0 < self._total == len(self._seen) or not self._rewards:
                return True
            elif self._finished:
                self._shard(self._finished.popleft())
            elif names := sorted(n for n in self._sampled.finished(self._seen) if n.startswith(f"{FOLDER}-")):
                self._finished.extend(names)
            elif leave(LOOK_SECONDS):
                break
        return False

    def _shard(self, name: str) -> None:
        """Reads a shard; the completions of one that is gone, or that is damaged, are none."""
        self._seen.add(name)
        files = self._sampled.files_of(name)
        self._total = self._total or _total(files)
        try:
            table = read_table(files, CompletionRow, SEEN)
        except FileNotFoundError:
            # The rollouts are committed, or are being sampled anew.
            return
        rows = [parts[-1] for parts in by_trajectory(table)]
        if rows and not self._read:
            self._ctx.log("finished shards of its rollouts are scored while others are sampled")
        self._read, self._completions = self._read + bool(rows), self._completions + len(rows)
        for reward_name, reward in self._rewards.items():
            if calls := _calls(reward, rows):
                self._todo.append(_Piece(reward_name, rows, calls))

    def _call(self, piece: _Piece) -> None:
        """Makes some calls that the reward's journal has not; the others are still to be done."""
        name, reward = piece.name, self._rewards[piece.name]
        journal = self._journals[name]
        journal.outage = False
        most = max(self._config.workers or cores(), self._config.max_concurrency if reward.function in WAITS else 1)
        journaled(
            journal,
            piece.rows,
            piece.calls[:most],
            reward.function,
            reward.arguments,
            seconds=reward.seconds,
            megabytes=reward.megabytes,
            workers=self._config.workers,
            max_concurrency=self._config.max_concurrency,
        )
        if self._has_failed(name):
            del self._rewards[name]
            (reason, count), *_ = journal.failures.most_common(1)
            self._ctx.log(
                f"reward {name} has failed on {journal.failures.total()} completions, more than max_failed_fraction "
                f"allows, most often ({count} times) with: {reason}; no more of it is scored ahead"
            )
        elif not journal.outage and (left := piece.calls[most:]):
            self._todo.appendleft(dataclasses.replace(piece, calls=left))
        # After an outage it is tried with the next shard; the stage says so where it lasts.

    def _has_failed(self, name: str) -> bool:
        """Whether a reward has failed on more than the stage would bear of all shards, were they like those so far."""
        expected = self._completions / self._read * max(self._total, 1)
        return self._journals[name].failures.total() > math.ceil(self._config.max_failed_fraction * expected)


def _calls(reward: Reward, rows: Sequence[CompletionRow]) -> list[list[int]]:
    """Numbers of the rows of each call, as the stage makes them: an episode without an end is in none."""
    groups: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        if row.stop != FAILED:
            groups.setdefault(row.place, []).append(number)
    return list(groups.values()) if reward.batch == "group" else [[i] for group in groups.values() for i in group]

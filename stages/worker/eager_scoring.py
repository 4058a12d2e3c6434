"""Score finished shards of rollouts while others are sampled (`flows.running.eager_scoring` starts this process).

The process appends to the journals that the score stage writes (`stages.common.journal`), in a folder that the stage
takes over. A call is known by all that its function sees, so nothing but time depends on them. The process leaves to
the stage: failures (R25), functions that see a whole round, and the reward model, whose last bits depend on the other
completions of a micro-batch. No stage imports this module, so its code is in no key.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stages.common.journal import Journal, journaled
from stages.contract.definition import Context
from stages.sampling.played import FAILED
from stages.sampling.rows import FOLDER
from stages.score.settings import COMPUTED, Config, Reward
from stages.score.stage import SEEN
from stages.store.artifacts import Store
from stages.store.work import WorkFolder
from stages.worker.parent_death import die_with_parent
from tuning.rows import CompletionRow, by_trajectory, read_table

LOOK_SECONDS = 0.5
"""Time between two looks for finished shards, in a folder of this host."""
CALLS_A_SLOT = 4
"""Calls of a batch for each call that runs at a time: a batch that was begun is finished when the rollouts end."""


def eager_rewards(config: Config) -> dict[str, Reward]:
    """Rewards that are called before their stage, by name: functions of one completion, or of one prompt's."""
    named = sorted(config.rewards.items())
    return {name: r for name, r in named if r.function not in COMPUTED and r.batch != "round"}


def main() -> None:
    """Score shards as the JSON line on stdin asks, until stdin ends."""
    asked = json.loads(sys.stdin.readline())
    die_with_parent(asked["parent"])
    # Ctrl-C goes to the whole foreground group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(asked["folder"])
    context = Context(
        config=Config.model_validate_json(json.dumps(asked["config"])),
        inputs={},
        out=folder,
        work=folder,
        seed=0,
        progress=lambda done, total, unit, **metrics: None,
        log=lambda line: print(line, flush=True),
        memory={},
    )
    sampled = WorkFolder(Store(asked["store"]), *asked["sampled"])
    score_shards(context, sampled, lambda seconds: bool(select.select([sys.stdin], [], [], seconds)[0]))


def score_shards(ctx: Context, sampled: WorkFolder, is_over: Callable[[float], bool]) -> None:
    """Call the rewards on each shard of a sampling stage's work folder as soon as it is finished.

    ctx: of the score stage, without inputs; its work folder gets the journals. is_over: whether the sampling has ended,
        waiting for up to the given seconds; no batch of calls begins after that.
    """
    rewards, seen = eager_rewards(ctx.config), set[str]()
    journals = {name: Journal(ctx, f"reward {name}", f"journal-{name}") for name in rewards}
    called, failed = dict.fromkeys(rewards, 0), dict.fromkeys(rewards, 0)
    while rewards and not is_over(0.0):
        shards = sorted(name for name in sampled.finished(seen) if name.startswith(f"{FOLDER}-"))
        if not shards:
            is_over(LOOK_SECONDS)
            continue
        seen.add(shards[0])
        rows = _rows(sampled, shards[0])
        for name, calls in [(n, calls) for n, r in rewards.items() for calls in _batches(ctx.config, r, rows)]:
            if (reward := rewards.get(name)) is None:
                continue
            if is_over(0.0):
                return
            limits = {"seconds": reward.seconds, "megabytes": reward.megabytes}
            limits |= {"workers": ctx.config.workers, "max_concurrency": ctx.config.max_concurrency}
            outcomes = journaled(journals[name], rows, calls, reward.function, reward.arguments, **limits).values()
            called[name] += len(outcomes)
            failed[name] += sum(outcome.failure is not None for outcome in outcomes)
            allowed = math.ceil(ctx.config.max_failed_fraction * called[name])
            if failed[name] > allowed or any(outcome.is_outage for outcome in outcomes):
                del rewards[name]
                ctx.log(
                    f"reward {name} failed on {failed[name]} of {called[name]} completions and is left to its stage"
                )


def _rows(sampled: WorkFolder, shard: str) -> list[CompletionRow]:
    """The completions of a shard that have ended; none of one that is gone or does not fit its checksums."""
    try:
        table = read_table(sampled.files_of(shard), CompletionRow, SEEN)
    except FileNotFoundError:
        return []
    return [row for parts in by_trajectory(table) for row in parts[-1:] if row.stop != FAILED]


def _batches(config: Config, reward: Reward, rows: Sequence[CompletionRow]) -> Iterator[list[list[int]]]:
    """Numbers of the rows of each call, as the stage makes them, in batches."""
    groups: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.place, []).append(number)
    calls = list(groups.values()) if reward.batch == "group" else [[i] for group in groups.values() for i in group]
    # Requests to a judge need no processes.
    slots = config.max_concurrency if reward.function == "judge" else config.workers or os.cpu_count() or 1
    size = CALLS_A_SLOT * slots
    for start in range(0, len(calls), size):
        yield calls[start : start + size]

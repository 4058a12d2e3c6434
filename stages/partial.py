"""A round's rollouts where completions may go on in later rounds: a round gives each so many tokens (Kimi k1.5).

What has not ended is carried, with its whole group, and goes on in the next round under the policy of that, beside the
round's own new prompts. Each token's log-probability is that of the policy which sampled it, and `segments/` says which
that was. The recipe's `rl.partial` chooses this stage in place of `rollout`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from stages.common.tables import count_rows, rows_at
from stages.contract.definition import Context, Reads, Stage
from stages.sampling.carried import CARRIED, SEGMENTS, Going, Group, begun, first_to_end, read_carried, spread
from stages.sampling.order import prompts_of_round
from stages.sampling.rows import FOLDER, too_long, write_refused
from stages.sampling.settings import Rollout
from tuning.rollout.segments import SegmentRow
from tuning.rows import CompletionRow, PromptRow, Row, write_table


class Config(Rollout):
    """Sampling as without carried completions, and how far they are carried."""

    round_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most new tokens of a completion; null: all of them, as in the last round."""
    max_lag: Annotated[int, Field(ge=1)] = 1
    """Updates by which the oldest token of a completion may be behind the policy that is trained on it."""
    lag: Annotated[int, Field(ge=0)] = 0
    """Updates by which the policy of this round is behind the one that is trained in it (`rl.staleness`)."""
    carried: bool = False
    """Whether the round before may have left completions."""


def run(ctx: Context) -> dict[str, Any]:
    """Writes the tables of whole and of carried groups and of segments, and `refused/`; returns counts, lags and speed.

    Raises ValueError where nothing is carried here and all prompts are too long.
    """
    config: Config = ctx.config
    version = config.round - config.lag
    new, refused = _new(ctx, version)
    groups = new + (read_carried(ctx.inputs["carried"], config.prompts) if config.carried else [])
    if not groups:
        raise ValueError(f"every prompt of the round is too long: {refused} prompts; see the lines above")
    started = time.monotonic()
    going = Going(ctx, config, groups, version, oldest=config.round + 1 - config.max_lag)
    after = going.on(groups, config.round_tokens, FOLDER)
    if (first := first_to_end(after)) is not None:
        # Of a group process 0 alone has it where an earlier try has sampled it.
        ended = {group.place: group for group in going.on([first], None, f"{FOLDER}-first")}
        after = [ended.get(group.place, group) for group in after]
    seconds = time.monotonic() - started
    if not ctx.is_primary:
        return {}
    if [group.place for group in after] != [group.place for group in groups]:
        raise RuntimeError(f"{len(after)} groups were sampled of {len(groups)}")
    _write(ctx, after, going)
    # Told, since such a round lasts as long as a whole one and trains on little.
    ran = {} if first is None else {"run_to_end": 1}
    return _metrics(config, after, seconds) | ran | {"refused_prompts": refused}


def _new(ctx: Context, version: int) -> tuple[list[Group], int]:
    """The groups that the round begins, and how many of its prompts are too long, which are listed."""
    config: Config = ctx.config
    data = ctx.inputs["data"]
    seed = ctx.seed if config.order_seed is None else config.order_seed
    numbers = prompts_of_round(config.prompts, count_rows(data, "prompts/"), config.round, seed, config.first)
    chosen = rows_at(data, "prompts/", PromptRow, numbers)
    refused = too_long(ctx, enumerate(chosen), config.max_tokens)
    write_refused(ctx, refused)
    places = {row.place for row in refused}
    prompts = [(place, prompt) for place, prompt in enumerate(chosen) if place not in places]
    return begun(ctx, config, prompts, version), len(refused)


def _write(ctx: Context, groups: Sequence[Group], going: Going) -> None:
    """Leaves the three tables. Optimizer steps follow the order of whole groups."""
    whole = [[going.told(row) for row in group.rows] for group in spread([one for one in groups if one.is_whole])]
    carried = [group.rows for group in groups if not group.is_whole]
    segments = [[one for of_sample in group.segments.values() for one in of_sample] for group in groups]
    _write_shards(ctx, FOLDER, CompletionRow, whole)
    _write_shards(ctx, CARRIED, CompletionRow, carried)
    _write_shards(ctx, SEGMENTS, SegmentRow, segments)


def _write_shards(ctx: Context, folder: str, kind: type[Row], groups: Sequence[Sequence[Row]]) -> None:
    """A table in files of so many groups as a shard has: a file holds less than 2^31 tokens, all groups may not."""
    size = ctx.config.shard_prompts
    # A table without a row too: the next stages read it.
    total = max(1, -(-len(groups) // size))
    for number in range(total):
        rows = [row for group in groups[number * size : (number + 1) * size] for row in group]
        write_table(ctx.out / folder / f"part-{number:05d}-of-{total:05d}.parquet", rows, kind.schema())


def _metrics(config: Config, groups: Sequence[Group], seconds: float) -> dict[str, Any]:
    """Of what is trained on, but for `tokens` and their speed, which are of all that was sampled."""
    whole = [group for group in groups if group.is_whole]
    rows = [row for group in whole for row in group.rows]
    segments = [one for group in groups for of_sample in group.segments.values() for one in of_sample]
    sampled = sum(one.tokens for one in segments if one.round == config.round)
    trained = [one for group in whole for of_sample in group.segments.values() for one in of_sample]
    lags, tokens = [config.round - one.version for one in trained], [one.tokens for one in trained]
    return {
        "groups": len(whole),
        "carried": sum(len(group.rows) for group in groups) - len(rows),
        "completions": len(rows),
        "mean_length": sum(tokens) / len(rows),
        "truncated": sum(row.stop == "length" for row in rows) / len(rows),
        "lag": float(np.average(lags, weights=tokens)),
        "lag_max": max(lags),
        "tokens": sampled,
        "tokens_per_second": round(sampled / max(seconds, 1e-9), 1),
    }


STAGE = Stage(
    "partial",
    1,
    Config,
    run,
    work="sample",
    title="rollouts",
    makes="rollouts",
    reads={
        "policy": Reads("policy"),
        "tokenizer": Reads("tokenizer"),
        "data": Reads("data", ("prompts/",)),
        "carried": Reads("carried", (f"{CARRIED}/", f"{SEGMENTS}/"), when=lambda c, _: c.carried),
    },
    headline=(
        "{groups} groups",
        "none whole: {run_to_end} run to its end",
        "{carried} carried",
        "lag {lag:.2f}",
        "{tokens_per_second:.0f} tok/s",
    ),
    samples="rollouts/",
)

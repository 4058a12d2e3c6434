"""One round's rollouts: G sampled completions of each prompt, with everything that was sampled (R3)."""

from __future__ import annotations

import time
from typing import Any

from rlhf.stages.common.tables import count_rows, rows_at
from rlhf.stages.contract.definition import Context, Reads, Stage
from rlhf.stages.sampling.episode_tables import FOLDER, summary, turns_summary
from rlhf.stages.sampling.order import prompts_of_round
from rlhf.stages.sampling.rows import Draw, refuse_long, sample_rows
from rlhf.stages.sampling.settings import Rollout as Config
from rlhf.stages.sampling.settings import loads, sources
from rlhf.tuning.agents.rows import TrajectoryRow
from rlhf.tuning.rows import PromptRow
from rlhf.tuning.rows import read_table as read_rows


def run(ctx: Context) -> dict[str, Any]:
    """Write the rollout table and `refused/`; return counts, and mean length and speed of the sampled tokens."""
    config: Config = ctx.config
    data = ctx.inputs["data"]
    seed = ctx.seed if config.order_seed is None else config.order_seed
    numbers = prompts_of_round(config.prompts, count_rows(data, "prompts/"), config.round, seed, config.first)
    chosen = rows_at(data, "prompts/", PromptRow, numbers)
    refused = refuse_long(ctx, chosen, config.max_tokens)
    # Places count refused prompts: the samples of a prompt do not depend on the others of the round.
    prompts = [(place, prompt) for place, prompt in enumerate(chosen) if place not in refused]
    started = time.monotonic()
    rows = sample_rows(ctx, prompts, Draw.of(config, config.completions, config.temperature, routing=True))
    seconds = time.monotonic() - started
    if not ctx.is_primary:
        return {}
    tokens = sum(len(row.token_ids) for row in rows)
    episodes: dict[str, Any] = {"mean_length": tokens / len(rows)}
    if config.environment:
        played = list(read_rows((ctx.out / FOLDER).glob("*.parquet"), TrajectoryRow))
        episodes = summary(played)
        # Sampled tokens of all parts of a trajectory, without observations.
        tokens = episodes["sampled_tokens"]
        episodes |= turns_summary(ctx.out / "turns", bool(config.environment.tools), played)
    return episodes | {
        "refused_prompts": len(refused),
        "completions": len(rows),
        "tokens": tokens,
        "truncated": sum(row.stop == "length" for row in rows) / len(rows),
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
    }


STAGE = Stage(
    "rollout",
    2,
    Config,
    run,
    loads=loads,
    sources=sources,
    work="sample",
    section="rl.rollout",
    title="rollouts",
    makes="rollouts",
    reads={"policy": Reads("policy"), "tokenizer": Reads("tokenizer"), "data": Reads("data", ("prompts/",))},
    headline=(
        "success {success:.3f}",
        "{turns:.1f} turns",
        "no end {failed_episodes}",
        "{tokens_per_second:.0f} tok/s",
    ),
    samples="rollouts/",
)

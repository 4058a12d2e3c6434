"""One greedy completion of each place of a round, whose reward is ReMax's baseline (arXiv:2310.10505)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlhf.stages.common.tables import read_table
from rlhf.stages.contract.definition import Context, Reads, Stage
from rlhf.stages.sampling.rows import FOLDER, Draw, sample_rows
from rlhf.stages.sampling.settings import SamplingConfig, loads, sources
from rlhf.tuning.rows import CompletionRow, PromptRow

# Of the completions themselves a baseline needs nothing.
PROMPTS = ("place", "prompt_id", "prompt", "answer", "metadata", "prompt_ids")


class Config(SamplingConfig):
    """Greedy decoding of a round's prompts, with the settings of the recipe's `rl.rollout`."""


def run(ctx: Context) -> dict[str, Any]:
    config: Config = ctx.config
    prompts = prompts_by_place(read_table(ctx.inputs["rollouts"], f"{FOLDER}/", CompletionRow, PROMPTS))
    rows = sample_rows(ctx, prompts, Draw.of(config, samples=1, temperature=0.0))
    return {"completions": len(rows), "tokens": sum(len(r.token_ids) for r in rows)}


def prompts_by_place(rollouts: Iterable[CompletionRow]) -> list[tuple[int, PromptRow]]:
    """Return (place, prompt) of a rollout table, in its order: a repeated prompt has a baseline at each place."""
    first: dict[int, CompletionRow] = {}
    for row in rollouts:
        first.setdefault(row.place, row)
    return [(place, row.as_prompt()) for place, row in first.items()]


STAGE = Stage(
    "greedy",
    1,
    Config,
    run,
    loads=loads,
    sources=sources,
    draws=lambda config: config.environment is not None,
    work="sample",
    title="greedy completions",
    makes="rollouts",
    reads={"policy": Reads("policy"), "tokenizer": Reads("tokenizer"), "rollouts": Reads("rollouts")},
    headline=("{completions} completions",),
)

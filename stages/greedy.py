"""One greedy completion of each prompt of a round, whose reward is ReMax's baseline (arXiv:2310.10505)."""

from __future__ import annotations

from typing import Any

from stages.common.tables import read_table
from stages.contract.definition import Context, Reads, Stage
from stages.sampling.rows import FOLDER, Draw, sample_rows
from stages.sampling.settings import SamplingConfig, loads
from tuning.rows import CompletionRow


class Config(SamplingConfig):
    """Greedy decoding of a round's prompts, with the settings of the recipe's `rl.rollout`."""


def run(ctx: Context) -> dict[str, Any]:
    config: Config = ctx.config
    first: dict[str, CompletionRow] = {}
    for row in read_table(ctx.inputs["rollouts"], f"{FOLDER}/", CompletionRow):
        # The first row of each prompt, in the order of their last ones: a round may hold a prompt twice.
        first[row.prompt_id] = first.pop(row.prompt_id, row)
    prompts = [(row.counter, row.as_prompt()) for row in first.values()]
    rows = sample_rows(ctx, prompts, Draw.of(config, samples=1, temperature=0.0))
    return {"completions": len(rows), "tokens": sum(len(r.token_ids) for r in rows)}


STAGE = Stage(
    "greedy",
    1,
    Config,
    run,
    loads=loads,
    title="greedy completions",
    makes="rollouts",
    reads={"policy": Reads("policy"), "tokenizer": Reads("tokenizer"), "rollouts": Reads("rollouts")},
    headline=("{completions} completions",),
)

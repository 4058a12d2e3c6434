"""Further prompts of a round, in place of those whose completions all score alike (DAPO, arXiv:2503.14476).

A refill samples as many new prompts as it expects to need and leaves its table empty where nothing is missing. The
update takes the first informative groups in order and accounts for all others (`stages.sampling.groups`).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from stages.common.models import load_policy
from stages.common.tables import read_rows, write_rows
from stages.contract.definition import Context, Reads, Stage
from stages.rollout import Config as RolloutConfig
from stages.rollout import loads, sample_rows, schema, too_long
from stages.sampling.groups import by_prompt, missing_prompts


class Config(RolloutConfig):
    """Sampling as in the round's rollouts."""

    number: Annotated[int, Field(ge=1)] = 1
    """Which refill of the round this is."""


def run(ctx: Context) -> dict[str, Any]:
    import numpy as np

    from tuning.rollout.requests import Sampling

    config: Config = ctx.config
    rollouts, scores = read_rows(ctx.inputs["rollouts"], "rollouts/"), read_rows(ctx.inputs["scores"], "scores/")
    for i in range(1, config.number):
        rollouts += read_rows(ctx.inputs[f"refill_{i}"], "rollouts/")
        scores += read_rows(ctx.inputs[f"refill_{i}_scores"], "scores/")
    groups = by_prompt(rollouts, scores)
    table = [r for r in read_rows(ctx.inputs["data"], "prompts/") if r["id"] not in groups]
    refused = too_long(table, config.max_tokens, load_policy(ctx, ctx.inputs["policy"])[0].max_positions)
    table = [r for r in table if r["id"] not in refused]
    order = np.random.default_rng(ctx.seed).permutation(len(table))
    wanted = missing_prompts(groups, config.prompts)
    chosen = [table[i] for i in order[:wanted]]
    if not chosen:
        write_rows(ctx.out / "rollouts" / "part-00000.parquet", [], schema())
        return {"prompts": 0, "completions": 0, "tokens": 0}
    rows = sample_rows(
        ctx,
        list(enumerate(chosen)),
        samples=config.completions,
        max_tokens=config.max_tokens,
        sampling=Sampling(temperature=config.temperature),
        shard=config.shard_prompts,
        quantize=config.quantize,
        engine=config.engine,
    )
    tokens = sum(len(r["token_ids"]) for r in rows)
    return {"prompts": len(chosen), "completions": len(rows), "tokens": tokens}


STAGE = Stage(
    "refill",
    1,
    Config,
    run,
    loads=loads,
    title="refill",
    makes="rollouts",
    reads={
        "policy": Reads("policy"),
        "tokenizer": Reads("tokenizer"),
        "data": Reads("data", ("prompts/",)),
        "rollouts": Reads("rollouts"),
        "scores": Reads("scores"),
        "refills": Reads("refill_*"),
    },
    headline=("{prompts} prompts",),
)

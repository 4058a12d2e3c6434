"""One greedy completion of each prompt of a round: its reward is ReMax's baseline (arXiv:2310.10505)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stages.common.settings import Compute
from stages.common.tables import read_rows
from stages.contract.definition import Context, Reads, Stage, StageConfig
from stages.rollout import loads, sample_rows
from stages.sampling.settings import EngineSettings


class Config(StageConfig):
    """Greedy decoding of a round's prompts; the recipe's `rl.rollout` says how long."""

    max_tokens: Annotated[int, Field(ge=1)] = 64
    """Longest completion in tokens, EOS included."""
    shard_prompts: Annotated[int, Field(ge=1)] = 32
    """Prompts of one shard."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """As of the round's rollouts."""
    engine: EngineSettings = EngineSettings()
    """As of the round's rollouts."""
    compute: Compute = Compute()
    """How to compute."""


def run(ctx: Context) -> dict[str, Any]:
    from tuning.rollout.requests import Sampling

    config: Config = ctx.config
    first = {r["prompt_id"]: r for r in reversed(read_rows(ctx.inputs["rollouts"], "rollouts/"))}
    names = ("prompt", "answer", "metadata", "prompt_ids")
    prompts = [(r["counter"], {"id": k, **{n: r[n] for n in names}}) for k, r in reversed(first.items())]
    rows = sample_rows(
        ctx,
        prompts,
        samples=1,
        max_tokens=config.max_tokens,
        sampling=Sampling(temperature=0.0),
        shard=config.shard_prompts,
        quantize=config.quantize,
        engine=config.engine,
    )
    return {"completions": len(rows), "tokens": sum(len(r["token_ids"]) for r in rows)}


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

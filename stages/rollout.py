"""One round's rollouts: G sampled completions of each prompt, with everything that was sampled (R3)."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import Field

from stages.base import Context, StageConfig
from stages.models import load_rounded, load_tokenizer, stop_ids
from stages.settings import Compute
from stages.tables import by_shard, read_rows

NAME = "rollout"
VERSION = 1


class Config(StageConfig):
    """Sampling of one round. Training samples with top_p = 1 and top_k = 0: ratios stay unbiased."""

    round: Annotated[int, Field(ge=0)] = 0
    """Number of the round: its place in the order of prompts and in the random stream."""
    prompts: Annotated[int, Field(ge=1)] = 32
    """Prompts of a round."""
    completions: Annotated[int, Field(ge=1)] = 8
    """Completions of each prompt."""
    max_tokens: Annotated[int, Field(ge=1)] = 64
    """Longest completion in tokens, EOS included."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; training uses the same."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """How the policy's kernels are rounded before sampling; the recipe takes it from rl.update.lora, for the round
    that begins with a policy which is not of that adapter yet."""
    shard_prompts: Annotated[int, Field(ge=1)] = 32
    """Prompts of one shard: what is kept when a round is interrupted."""
    compute: Compute = Compute()
    """How to compute."""


def prompt_numbers(count: int, total: int, round_number: int, seed: int) -> list[int]:
    """Which of `total` prompts round `round_number` uses: passes over shuffled orders, none skipped."""
    import grain.python as grain

    chosen = []
    for position in range(round_number * count, (round_number + 1) * count):
        lap, place = divmod(position, total)
        order = grain.MapDataset.range(total).shuffle(seed=(seed + lap) % 2**31)
        chosen.append(int(order[place]))
    return chosen


def schema() -> Any:
    """Columns of the rollout table: one row a completion."""
    import pyarrow as pa

    return pa.schema(
        [
            ("prompt_id", pa.string()),
            ("sample", pa.int32()),
            ("prompt", pa.string()),
            ("answer", pa.string()),
            ("metadata", pa.string()),
            ("prompt_ids", pa.list_(pa.int32())),
            ("token_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            ("text", pa.string()),
            ("stop", pa.string()),
            ("policy", pa.string()),
            ("seed", pa.int64()),
            ("counter", pa.int64()),
            ("temperature", pa.float32()),
        ]
    )


def sample_rows(
    ctx: Context,
    prompts: list[dict[str, Any]],
    *,
    samples: int,
    max_tokens: int,
    sampling: Any,
    shard: int,
    quantize: str = "none",
) -> list[dict[str, Any]]:
    """Samples completions of prompt rows in resumable shards and returns the rollout table's rows."""
    from tuning.device import choose
    from tuning.rollout.engine import Engine
    from tuning.training.batch import bucket

    device = choose(ctx.config.compute.dtype)
    policy = ctx.inputs["policy"]
    tokenizer = load_tokenizer(ctx, ctx.inputs["tokenizer"])
    eos = stop_ids(ctx, ctx.inputs["tokenizer"])
    config, params = load_rounded(ctx, policy, quantize)
    engine = Engine(config, device.compute.dtype)
    width = bucket(max(len(p["prompt_ids"]) for p in prompts), 16)
    control = set(tokenizer.all_special_ids) | set(eos)

    def make(chunk: Any) -> list[dict[str, Any]]:
        found = engine.generate(
            params,
            [p["prompt_ids"] for _, p in chunk],
            samples=samples,
            max_tokens=max_tokens,
            sampling=sampling,
            eos_ids=eos,
            seed=ctx.seed,
            counters=[number for number, _ in chunk],
            rows=ctx.config.compute.rollout_rows or device.rollout_rows,
            width=width,
        )
        return [
            {
                "prompt_id": row["id"],
                "sample": s,
                "prompt": row["prompt"],
                "answer": row["answer"],
                "metadata": row["metadata"],
                "prompt_ids": row["prompt_ids"],
                "token_ids": completion.tokens,
                "logprobs": completion.logps,
                "text": tokenizer.decode([t for t in completion.tokens if t not in control]),
                "stop": completion.stop,
                "policy": policy.digest,
                "seed": ctx.seed,
                "counter": number,
                "temperature": sampling.temperature,
            }
            for (number, row), completions in zip(chunk, found, strict=True)
            for s, completion in enumerate(completions)
        ]

    return by_shard(ctx, "rollouts", list(enumerate(prompts)), shard, schema(), make, "prompts")


def run(ctx: Context) -> dict[str, Any]:
    from tuning.rollout.sampling import Sampling

    config = ctx.config
    table = read_rows(ctx.inputs["data"], "prompts/")
    numbers = prompt_numbers(config.prompts, len(table), config.round, ctx.seed)
    started = time.monotonic()
    rows = sample_rows(
        ctx,
        [table[i] for i in numbers],
        samples=config.completions,
        max_tokens=config.max_tokens,
        sampling=Sampling(temperature=config.temperature),
        shard=config.shard_prompts,
        quantize=config.quantize,
    )
    seconds = time.monotonic() - started
    tokens = sum(len(r["token_ids"]) for r in rows)
    if len(rows) != config.prompts * config.completions:
        raise RuntimeError(f"{len(rows)} completions for {config.prompts} prompts x {config.completions}")
    return {
        "completions": len(rows),
        "tokens": tokens,
        "mean_length": tokens / len(rows),
        "truncated": sum(r["stop"] == "length" for r in rows) / len(rows),
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
    }

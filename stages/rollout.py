"""One round's rollouts: G sampled completions of each prompt, with everything that was sampled (R3)."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from stages.common.models import limits_of, load_policy, load_rounded, load_tokenizer, stop_ids
from stages.common.settings import Compute
from stages.common.tables import by_shard, read_rows, write_rows
from stages.contract.definition import Context, Reads, Stage, StageConfig
from stages.sampling.settings import NATIVE, SERVERS, EngineSettings, engine_modules


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
    engine: EngineSettings = EngineSettings()
    """What samples."""
    compute: Compute = Compute()
    """How to compute."""


def loads(config: Any) -> tuple[str, ...]:
    """The modules of an engine that is not in the worker."""
    return engine_modules(config.engine)


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


def too_long(prompts: Sequence[dict[str, Any]], max_tokens: int, positions: int) -> dict[str, str]:
    """Why prompts are refused, by prompt id."""
    return {
        p["id"]: f"{len(p['prompt_ids'])} tokens and {max_tokens} new ones exceed the model's {positions} positions"
        for p in prompts
        if len(p["prompt_ids"]) + max_tokens > positions
    }


def sample_rows(
    ctx: Context,
    prompts: Sequence[tuple[int, dict[str, Any]]],
    *,
    samples: int,
    max_tokens: int,
    sampling: Any,
    shard: int,
    quantize: str = "none",
    engine: EngineSettings | None = None,
) -> list[dict[str, Any]]:
    """Samples completions of (place in the random stream, prompt row) in resumable shards; the rollout table's rows."""
    from tuning.rollout.requests import Request
    from tuning.shapes import bucket

    policy = ctx.inputs["policy"]
    tokenizer = load_tokenizer(ctx, ctx.inputs["tokenizer"])
    eos = stop_ids(ctx, ctx.inputs["tokenizer"])
    # A shard is sampled alone by an engine of the same size: what an earlier try left changes no bit of it.
    context = bucket(max((len(p["prompt_ids"]) for _, p in prompts), default=0) + max_tokens, 64)
    opened: list[Any] = []
    control = set(tokenizer.all_special_ids) | set(eos)

    def record(number: int, row: dict[str, Any], sample: int, completion: Any) -> dict[str, Any]:
        return {
            "prompt_id": row["id"],
            "sample": sample,
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

    def make(chunk: Sequence[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
        requests = [
            Request(row["prompt_ids"], max_tokens, sampling, eos, ctx.seed, number, samples, name=row["id"])
            for number, row in chunk
        ]
        if not opened:
            opened.append(_opened(ctx, engine or EngineSettings(), quantize, context, requests))
        found = dict(opened[0].run(requests))
        return [record(*chunk[i], s, c) for i in range(len(chunk)) for s, c in enumerate(found[i])]

    return by_shard(ctx, "rollouts", prompts, shard, schema(), make, "prompts")


def _opened(ctx: Context, settings: EngineSettings, quantize: str, context: int, requests: Sequence[Any]) -> Any:
    """The engine with the policy loaded."""
    if settings.kind != "native":
        # By name, not by import: what native rollouts do without is no part of their code.
        return importlib.import_module(SERVERS).opened(ctx, settings, quantize, context, requests)
    from tuning.device import choose
    from tuning.rollout.engine.engine import Engine
    from tuning.rollout.engine.placement import sampling_mesh

    device = choose(ctx.config.compute.dtype)
    config, params = load_rounded(ctx, ctx.inputs["policy"], quantize)
    limits = limits_of(ctx.config.compute, device, min(context, config.max_positions))
    mesh = sampling_mesh(ctx.config.compute.mesh)
    smaller = {name: getattr(settings, name) for name in NATIVE}
    engine = Engine(config, device.compute.dtype, limits, mesh=mesh, **smaller)
    engine.load(params)
    return engine


def run(ctx: Context) -> dict[str, Any]:
    import pyarrow as pa

    from tuning.rollout.requests import Sampling

    config = ctx.config
    table = read_rows(ctx.inputs["data"], "prompts/")
    numbers = prompt_numbers(config.prompts, len(table), config.round, ctx.seed)
    chosen = [table[i] for i in numbers]
    refused = too_long(chosen, config.max_tokens, load_policy(ctx, ctx.inputs["policy"])[0].max_positions)
    for prompt, reason in refused.items():
        ctx.log(f"prompt {prompt} is refused: {reason}; shorten it, or rl.rollout.max_tokens")
    if len(refused) == len(chosen):
        raise ValueError(f"every prompt of the round is too long, as {next(iter(refused))}: {refused.popitem()[1]}")
    columns = [("prompt_id", pa.string()), ("reason", pa.string())]
    rejects = [{"prompt_id": p, "reason": r} for p, r in refused.items()]
    write_rows(ctx.out / "refused" / "part-00000.parquet", rejects, pa.schema(columns))
    started = time.monotonic()
    rows = sample_rows(
        ctx,
        [(number, p) for number, p in enumerate(chosen) if p["id"] not in refused],
        samples=config.completions,
        max_tokens=config.max_tokens,
        sampling=Sampling(temperature=config.temperature),
        shard=config.shard_prompts,
        quantize=config.quantize,
        engine=config.engine,
    )
    seconds = time.monotonic() - started
    tokens = sum(len(r["token_ids"]) for r in rows)
    sampled = sum(p["id"] not in refused for p in chosen)
    if len(rows) != sampled * config.completions:
        raise RuntimeError(f"{len(rows)} completions for {sampled} prompts x {config.completions}")
    return {
        "refused_prompts": len(chosen) - sampled,
        "completions": len(rows),
        "tokens": tokens,
        "mean_length": tokens / len(rows),
        "truncated": sum(r["stop"] == "length" for r in rows) / len(rows),
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
    }


STAGE = Stage(
    "rollout",
    2,
    Config,
    run,
    loads=loads,
    section="rl.rollout",
    title="rollouts",
    makes="rollouts",
    reads={"policy": Reads("policy"), "tokenizer": Reads("tokenizer"), "data": Reads("data", ("prompts/",))},
    headline=("{tokens_per_second:.0f} tok/s",),
    samples="rollouts/",
)

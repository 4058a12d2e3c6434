"""Scores of one round's rollouts: each reward by name, and their weighted sum. Samples nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stages.base import Context, StageConfig, execution_setting
from stages.code import function_digests
from stages.models import load_scorer
from stages.settings import Compute
from stages.tables import by_shard, read_rows, reward_samples

NAME = "score"
VERSION = 1

MODEL = "reward_model"


class Reward(StageConfig):
    """One reward in the sum."""

    function: str = "exact_match"
    """A built-in name, `module:function`, or `reward_model`."""
    weight: float = 1.0
    """Its factor in the sum."""
    arguments: dict[str, str | int | float | bool] = {}
    """Keyword arguments of the function."""
    squash: Literal["none", "sigmoid"] = "none"
    """Applied to the value before the weight."""
    seconds: Annotated[float, Field(gt=0)] = 10.0
    """Wall-clock limit of one sample."""


class Config(StageConfig):
    """How completions are rewarded."""

    rewards: dict[str, Reward] = {"exact": Reward()}
    """Rewards by name."""
    truncated: Literal["keep", "zero"] = "keep"
    """What a completion cut off at max_tokens gets: its rewards, or a total of 0."""
    shard_completions: Annotated[int, Field(ge=1)] = 256
    """Completions of one shard: what is kept when scoring is interrupted."""
    compute: Compute = Compute()
    """How to compute."""
    workers: int = execution_setting(2, ge=1)
    """Processes that run reward functions."""

    @model_validator(mode="after")
    def _some(self) -> Config:
        if not self.rewards:
            raise ValueError("rewards is empty: name at least one reward")
        return self

    @property
    def learned(self) -> bool:
        """Whether a reward model takes part."""
        return any(r.function == MODEL for r in self.rewards.values())


def source_digests(config: Config) -> dict[str, str]:
    """Hashes of reward functions that are not built in, for the key: an edited function is another reward."""
    found: dict[str, str] = {}
    for name, reward in config.rewards.items():
        if reward.function != MODEL:
            found |= function_digests(reward.function, f"rl.score.rewards.{name}.function")
    return found


def schema(names: list[str]) -> Any:
    """Columns of the score table: one row a completion, null where a reward failed or does not apply."""
    import pyarrow as pa

    rewards = pa.struct([(n, pa.float32()) for n in names])
    return pa.schema(
        [
            ("prompt_id", pa.string()),
            ("sample", pa.int32()),
            ("rewards", rewards),
            ("total", pa.float32()),
            ("failure", pa.string()),
        ]
    )


def run(ctx: Context) -> dict[str, Any]:
    config: Config = ctx.config
    rollouts = read_rows(ctx.inputs["rollouts"], "rollouts/")
    names = sorted(config.rewards)

    def make(chunk: Any) -> list[dict[str, Any]]:
        columns = {name: _column(ctx, config.rewards[name], list(chunk)) for name in names}
        return [_row(config, row, {n: columns[n][i] for n in names}) for i, row in enumerate(chunk)]

    rows = by_shard(ctx, "scores", rollouts, config.shard_completions, schema(names), make, "completions")
    return summarise(rows, names)


def _column(ctx: Context, reward: Reward, rows: list[dict[str, Any]]) -> list[tuple[float | None, str | None]]:
    if reward.function == MODEL:
        return [(v, None) for v in _learned(ctx, rows)]
    from tuning.rewards.processes import evaluate

    samples = reward_samples(rows)
    found = evaluate(reward.function, reward.arguments, samples, seconds=reward.seconds, workers=ctx.config.workers)
    return [(o.value, o.failure) for o in found]


def _learned(ctx: Context, rows: list[dict[str, Any]]) -> list[float]:
    from tuning.rewards.learned import score_groups
    from tuning.training.batch import Group

    config, params = load_scorer(ctx, ctx.inputs["reward"])
    # Completions of one prompt share it, and equal completions are computed once.
    by_prompt: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
    slot_of = []
    count = 0
    for r in rows:
        texts = by_prompt.setdefault(tuple(r["prompt_ids"]), {})
        tokens = tuple(r["token_ids"])
        if tokens not in texts:
            texts[tokens] = count
            count += 1
        slot_of.append(texts[tokens])
    groups = [Group(prompt, list(texts), list(texts.values())) for prompt, texts in by_prompt.items()]
    compute = ctx.config.compute
    found = score_groups(config, params, groups, dtype=compute.dtype, budget=compute.tokens_per_micro_batch)
    return [float(found[s]) for s in slot_of]


def _row(config: Config, row: dict[str, Any], found: dict[str, tuple[float | None, str | None]]) -> dict[str, Any]:
    import math

    total, failures = 0.0, []
    values: dict[str, float | None] = {}
    for name, (value, failure) in found.items():
        reward = config.rewards[name]
        if value is not None and reward.squash == "sigmoid":
            value = 1 / (1 + math.exp(-value))
        values[name] = value
        if failure is not None:
            failures.append(f"{name}: {failure}")
        elif value is not None:
            total += reward.weight * value
    if config.truncated == "zero" and row["stop"] == "length":
        total = 0.0
    return {
        "prompt_id": row["prompt_id"],
        "sample": row["sample"],
        "rewards": values,
        "total": None if failures else total,
        "failure": "; ".join(failures) or None,
    }


def summarise(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Means by reward, share of failed samples, share of groups whose totals do not vary."""
    import numpy as np

    totals = [r["total"] for r in rows if r["total"] is not None]
    groups: dict[str, list[float]] = {}
    for r in rows:
        if r["total"] is not None:
            groups.setdefault(r["prompt_id"], []).append(r["total"])
    metrics: dict[str, Any] = {
        "completions": len(rows),
        "failed": sum(r["failure"] is not None for r in rows) / len(rows),
        "reward": float(np.mean(totals)) if totals else None,
        "spread": float(np.std(totals)) if totals else None,
        "zero_variance": float(np.mean([max(g) - min(g) < 1e-6 for g in groups.values()])) if groups else 1.0,
    }
    for name in names:
        values = [r["rewards"][name] for r in rows if r["rewards"][name] is not None]
        metrics[f"reward_{name}"] = float(np.mean(values)) if values else None
    return metrics

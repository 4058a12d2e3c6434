"""Scores of one round's rollouts: each reward by name, and their weighted sum. Samples nothing."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stages.common.models import load_scorer
from stages.common.settings import Compute
from stages.common.tables import by_shard, read_rows, reward_samples, write_rows
from stages.contract.definition import Context, Reads, Stage, StageConfig, execution_setting
from stages.contract.sources import function_digests

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
    """Applied to the value first."""
    clip: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """Range to which the value is limited then."""
    normalise: Literal["none", "group", "batch"] = "none"
    """Centre and scale the values of a prompt's completions, or of the round, before the weight."""
    on_failure: Literal["drop", "zero", "stop"] = "drop"
    """What a timeout, an error or NaN does: the completion leaves the round, the reward counts as 0, the run ends."""
    seconds: Annotated[float, Field(gt=0)] = 10.0
    """Wall-clock limit of one sample."""
    megabytes: Annotated[int, Field(ge=16)] = 2048
    """Memory that one sample may take, beyond what the function's process holds before it."""

    @model_validator(mode="after")
    def _ordered(self) -> Reward:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip {self.clip}: the first number must be below the second")
        return self


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
    import shutil

    config: Config = ctx.config
    rollouts = read_rows(ctx.inputs["rollouts"], "rollouts/")
    names = sorted(config.rewards)
    journals = {n: Journal(ctx, n) for n in names if config.rewards[n].function != MODEL}

    def make(chunk: Any) -> list[dict[str, Any]]:
        columns = {name: _column(ctx, name, list(chunk), journals.get(name)) for name in names}
        return [_row(row, {n: columns[n][i] for n in names}) for i, row in enumerate(chunk)]

    columns = schema(names)
    values = by_shard(ctx, "scores", rollouts, config.shard_completions, columns, make, "completions")
    # Shards hold what each reward said; totals may need the whole round.
    rows = with_totals(config, rollouts, values)
    shutil.rmtree(ctx.out / "scores", ignore_errors=True)
    write_rows(ctx.out / "scores" / "part-00000.parquet", rows, columns)
    return summarise(rows, names)


class Journal:
    """Finished scores of a reward function, one line each, so that a kill costs those under way alone."""

    def __init__(self, ctx: Context, name: str):
        self._path = ctx.work / f"journal-{name}.jsonl"
        self._known: dict[str, tuple[float | None, str | None]] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                # The last line may have been cut off by the kill.
                with contextlib.suppress(ValueError):
                    place, value, failure = json.loads(line)
                    self._known[place] = (value, failure)
            ctx.log(f"reward {name}: {len(self._known)} finished scores are reused")

    @staticmethod
    def _place(row: dict[str, Any]) -> str:
        return f"{row['prompt_id']}/{row['sample']}"

    def get(self, row: dict[str, Any]) -> tuple[float | None, str | None] | None:
        """The finished score of a completion; None where there is none."""
        return self._known.get(self._place(row))

    def add(self, row: dict[str, Any], value: float | None, failure: str | None) -> None:
        self._known[self._place(row)] = (value, failure)
        with self._path.open("a") as f:
            f.write(json.dumps([self._place(row), value, failure]) + "\n")


def _column(
    ctx: Context, name: str, rows: list[dict[str, Any]], journal: Journal | None
) -> list[tuple[float | None, str | None]]:
    reward: Reward = ctx.config.rewards[name]
    if journal is None:
        return [(v, None) for v in _learned(ctx, rows)]
    from tuning.rewards.processes import evaluate

    todo = [r for r in rows if journal.get(r) is None]
    evaluate(
        reward.function,
        reward.arguments,
        reward_samples(todo),
        seconds=reward.seconds,
        megabytes=reward.megabytes,
        workers=ctx.config.workers,
        finished=lambda number, outcome: journal.add(todo[number], outcome.value, outcome.failure),
    )
    return [journal.get(r) or (None, None) for r in rows]


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


def _row(row: dict[str, Any], found: dict[str, tuple[float | None, str | None]]) -> dict[str, Any]:
    failures = json.dumps({n: f for n, (_, f) in found.items() if f is not None})
    values = {n: v for n, (v, _) in found.items()}
    return {"prompt_id": row["prompt_id"], "sample": row["sample"], "rewards": values, "failure": failures}


def with_totals(config: Config, rollouts: list[dict[str, Any]], values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The score table: shaped rewards, their weighted sum and the failures, in the order of the rollouts."""
    import numpy as np

    from tuning.rewards.totals import Part, shaped, totals

    parts = []
    for name, r in sorted(config.rewards.items()):
        clip = None if r.clip is None else (r.clip[0], r.clip[1])
        parts.append(Part(name, r.weight, r.squash, clip, r.normalise, r.on_failure))
    failed = [json.loads(v["failure"]) for v in values]
    columns = [
        [
            (None if v["rewards"][p.name] is None else shaped(v["rewards"][p.name], p), f.get(p.name))
            for v, f in zip(values, failed, strict=True)
        ]
        for p in parts
    ]
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault(r["prompt_id"], len(numbers)) for r in rollouts]
    sums, failures = totals(columns, parts, groups)
    rows = []
    for i, (row, value, rollout) in enumerate(zip(values, sums.tolist(), rollouts, strict=True)):
        total = 0.0 if config.truncated == "zero" and rollout["stop"] == "length" else value
        rewards = {p.name: c[i][0] for p, c in zip(parts, columns, strict=True)}
        kept = np.isfinite(value)
        rows.append(row | {"rewards": rewards, "total": total if kept else None, "failure": failures[i]})
    return rows


def summarise(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Means by reward, share of failed samples, share of groups whose totals do not vary."""
    import numpy as np

    from tuning.losses.groups import is_informative

    if not rows:
        return {"completions": 0}
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
        "zero_variance": float(np.mean([not is_informative(g) for g in groups.values()])) if groups else 1.0,
    }
    for name in names:
        values = [r["rewards"][name] for r in rows if r["rewards"][name] is not None]
        metrics[f"reward_{name}"] = float(np.mean(values)) if values else None
    return metrics


STAGE = Stage(
    "score",
    1,
    Config,
    run,
    sources=source_digests,
    section="rl.score",
    title="scores",
    makes="scores",
    reads={"rollouts": Reads("rollouts"), "reward": Reads("reward", when=lambda c, _: c.learned)},
    headline=(
        "reward {reward:.3f}",
        # The first reward that is no model's: the share of completions that pass a check.
        lambda metrics: next(
            (
                f"pass {v:.3f}"
                for k, v in metrics.items()
                if k.startswith("reward_") and "model" not in k and v is not None
            ),
            "",
        ),
        "zero-var {zero_variance:.2f}",
    ),
)

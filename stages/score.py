"""Scores of one round's rollouts: each reward by name, and their weighted sum. Samples nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import Field, model_validator

from stages.common.models import load_scorer
from stages.common.settings import Compute
from stages.common.tables import Shards, by_shard, read_table
from stages.contract.definition import Context, Reads, Stage, StageConfig, execution_setting
from stages.contract.sources import function_digests
from stages.sampling.groups import informative_places, totals_by_place
from tuning.rewards.samples import Outcome, Sample
from tuning.rows import (
    CompletionRow,
    Index,
    Number,
    Row,
    ScoreRow,
    Text,
    columns_of,
    names_of,
    numbers_of_groups,
    write_table,
)

# The name, among reward functions, of the run's reward model.
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

    @property
    def part(self) -> dict[str, Any]:
        """How it enters the total: the fields of `tuning.rewards.totals.Part` but the name."""
        clip = None if self.clip is None else tuple(self.clip)
        return self.model_dump(include={"weight", "squash", "normalise", "on_failure"}) | {"clip": clip}


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
    digests: dict[str, str] = {}
    for name, reward in config.rewards.items():
        if reward.function != MODEL:
            digests |= function_digests(reward.function, f"rl.score.rewards.{name}.function")
    return digests


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutcomeRow(Row):
    """The outcome of every reward for a completion: a row of a shard in the work folder."""

    place: Number
    sample: Index
    prompt_id: Text
    values: Annotated[Mapping[str, float | None], pa.struct([])]
    failures: Annotated[Mapping[str, str | None], pa.struct([])]

    @classmethod
    def schema(cls, names: Sequence[str] = ()) -> pa.Schema:
        """Columns of a table with these rewards."""
        # As the functions gave them, in 64 bits: totals must not depend on which shards an earlier try has left.
        values = pa.struct([(name, pa.float64()) for name in names])
        failures = pa.struct([(name, pa.string()) for name in names])
        # The structs have a field a reward, which the class cannot know.
        columns = columns_of(cls) | {"values": values, "failures": failures}
        return pa.schema(list(columns.items()))

    def outcome(self, name: str) -> Outcome:
        """What the reward `name` gave."""
        return Outcome(self.values[name], self.failures[name])


def run(ctx: Context) -> dict[str, Any]:
    """Writes the score table; returns means by reward and shares of failures."""
    config: Config = ctx.config
    rollouts = read_table(ctx.inputs["rollouts"], "rollouts/", CompletionRow)
    if len(set(names_of(rollouts))) != len(rollouts):
        raise RuntimeError(f"{ctx.inputs['rollouts'].url}: two completions have one place and sample (R21)")
    names = sorted(config.rewards)
    columns = _outcomes(ctx, names, rollouts)
    rows = with_totals(config, rollouts, columns)
    write_table(ctx.out / "scores" / "part-00000.parquet", rows, ScoreRow.schema(names))
    return summarise(rows, names)


def _outcomes(ctx: Context, names: Sequence[str], rollouts: Sequence[CompletionRow]) -> dict[str, list[Outcome]]:
    """The outcomes of each reward by its name, in the order of the rollouts; finished shards are reused."""
    rewards = ctx.config.rewards
    # A function may be slow or cost money, so each of its scores is kept. A reward model is cheap to run again.
    journals = {name: Journal(ctx, name) for name in names if rewards[name].function != MODEL}

    def make(chunk: Sequence[CompletionRow]) -> list[OutcomeRow]:
        columns = {}
        for name in names:
            columns[name] = _called(ctx, name, chunk, journals[name]) if name in journals else _learned(ctx, chunk)
        return [_outcome_row(row, {n: columns[n][i] for n in names}) for i, row in enumerate(chunk)]

    schema = OutcomeRow.schema(names)
    shards = Shards("scores", OutcomeRow, schema, ctx.config.shard_completions, "completions")
    rows, _ = by_shard(ctx, shards, rollouts, make)
    return {name: [row.outcome(name) for row in rows] for name in names}


def _outcome_row(row: CompletionRow, outcomes: Mapping[str, Outcome]) -> OutcomeRow:
    values = {name: outcome.value for name, outcome in outcomes.items()}
    failures = {name: outcome.failure for name, outcome in outcomes.items()}
    return OutcomeRow(place=row.place, sample=row.sample, prompt_id=row.prompt_id, values=values, failures=failures)


class Journal:
    """Finished scores of a reward function, one line each, so that a kill costs only those under way."""

    def __init__(self, ctx: Context, name: str):
        self._path = ctx.work / f"journal-{name}.jsonl"
        # By (place, sample).
        self._known: dict[tuple[int, int], Outcome] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                # The last line may have been cut off by the kill.
                with contextlib.suppress(ValueError):
                    place, sample, value, failure = json.loads(line)
                    self._known[place, sample] = Outcome(value, failure)
            ctx.log(f"reward {name}: {len(self._known)} finished scores are reused")

    def get(self, row: CompletionRow) -> Outcome | None:
        """The finished score of a completion; None where there is none."""
        return self._known.get((row.place, row.sample))

    def add(self, row: CompletionRow, outcome: Outcome) -> None:
        """Stores a finished score."""
        self._known[row.place, row.sample] = outcome
        # Opened for each line: a kill costs at most the line that is being written.
        with self._path.open("a") as f:
            f.write(json.dumps([row.place, row.sample, outcome.value, outcome.failure]) + "\n")


def _called(ctx: Context, name: str, rows: Sequence[CompletionRow], journal: Journal) -> list[Outcome]:
    """Outcomes of a reward function; the journal has those of an earlier try."""
    from tuning.rewards.processes import evaluate

    reward: Reward = ctx.config.rewards[name]
    todo = [row for row in rows if journal.get(row) is None]
    evaluate(
        reward.function,
        reward.arguments,
        [Sample.of(row) for row in todo],
        seconds=reward.seconds,
        megabytes=reward.megabytes,
        workers=ctx.config.workers,
        finished=lambda number, outcome: journal.add(todo[number], outcome),
    )
    return [journal.get(row) or Outcome(None) for row in rows]


def _learned(ctx: Context, rows: Sequence[CompletionRow]) -> list[Outcome]:
    """Outcomes of the reward model."""
    from tuning.rewards.learned import score_groups
    from tuning.training.batch import Group

    config, params = load_scorer(ctx, ctx.inputs["reward"])
    # Completions of one prompt share its tokens in a packed row, and equal completions are computed once.
    by_prompt: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
    places = []
    count = 0
    for row in rows:
        # Tokens of a completion -> its number among the scores.
        completions = by_prompt.setdefault(tuple(row.prompt_ids), {})
        tokens = tuple(row.token_ids)
        if tokens not in completions:
            completions[tokens] = count
            count += 1
        places.append(completions[tokens])
    groups = [Group(prompt, list(texts), list(texts.values())) for prompt, texts in by_prompt.items()]
    compute = ctx.config.compute
    scores = score_groups(config, params, groups, dtype=compute.dtype, budget=compute.tokens_per_micro_batch)
    return [Outcome(float(scores[place])) for place in places]


def with_totals(
    config: Config, rollouts: Sequence[CompletionRow], columns: Mapping[str, Sequence[Outcome]]
) -> list[ScoreRow]:
    """The score table: shaped rewards, their weighted sum and the failures, in the order of the rollouts."""
    from tuning.rewards.totals import Part, shaped, totals

    parts = [Part(name, **reward.part) for name, reward in sorted(config.rewards.items())]

    def shaped_outcome(outcome: Outcome, part: Part) -> Outcome:
        return outcome if outcome.value is None else Outcome(shaped(outcome.value, part), outcome.failure)

    values = {part.name: [shaped_outcome(outcome, part) for outcome in columns[part.name]] for part in parts}
    sums, failures = totals(list(values.values()), parts, numbers_of_groups(rollouts))
    rows = []
    for i, (row, total) in enumerate(zip(rollouts, sums.tolist(), strict=True)):
        rewards = {name: column[i].value for name, column in values.items()}
        # None where a reward failed and its `on_failure` is `drop`: the total is then NaN.
        kept = None
        if math.isfinite(total):
            kept = 0.0 if config.truncated == "zero" and row.stop == "length" else total
        rows.append(
            ScoreRow(
                place=row.place,
                sample=row.sample,
                prompt_id=row.prompt_id,
                rewards=rewards,
                total=kept,
                failure=failures[i],
            )
        )
    return rows


def summarise(rows: Sequence[ScoreRow], names: Sequence[str]) -> dict[str, Any]:
    """Means by reward, share of failed samples, share of groups whose totals carry no signal."""
    import numpy as np

    if not rows:
        return {"completions": 0}
    totals = [row.total for row in rows if row.total is not None]
    groups = {place: mine for place, mine in totals_by_place(rows).items() if mine}
    metrics: dict[str, Any] = {
        "completions": len(rows),
        "failed": sum(row.failure is not None for row in rows) / len(rows),
        "reward": float(np.mean(totals)) if totals else None,
        "spread": float(np.std(totals)) if totals else None,
        "zero_variance": (len(groups) - len(informative_places(groups))) / len(groups) if groups else 1.0,
    }
    for name in names:
        values = [value for row in rows if (value := row.rewards[name]) is not None]
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
        # Also where no completion has one: a round's line never lacks it.
        lambda m: "reward " + ("none" if m.get("reward") is None else f"{m['reward']:.3f}"),
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

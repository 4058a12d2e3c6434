"""Scores of one round's rollouts: each reward by name, and their weighted sum. Samples nothing."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf.stages.common.sandboxed_code import RUNS_CODE, code_can_reach, suspect_code
from rlhf.stages.common.tables import read_table
from rlhf.stages.contract.definition import Context, Reads, Stage
from rlhf.stages.sampling.episode_tables import FAILED
from rlhf.stages.sampling.groups import informative_places, totals_by_place
from rlhf.stages.score.outcomes import Columns, outcomes_of
from rlhf.stages.score.settings import Config, source_digests
from rlhf.tuning.rewards.failures import MOST, tallied
from rlhf.tuning.rewards.samples import Outcome
from rlhf.tuning.rows import CompletionRow, ScoreRow, by_trajectory, numbers_of_groups, write_table

if TYPE_CHECKING:
    from rlhf.tuning.rewards.totals import Part, Scale

# What rewards may see of a rollout: not the log-probabilities, which are as large as the tokens.
SEEN = (
    "place", "sample", "part", "prompt_id", "prompt", "answer", "metadata", "prompt_ids", "token_ids", "text", "stop",
)  # fmt: skip
SCALE = "scale.json"
"""The file of the artifact with the scales of rewards that are normalised over the round."""
NO_END = "the episode has no end"
"""The failure of a completion whose environment failed; `trajectories/` has the reason."""
REASON_WIDTH = 60
"""Characters of a reason on the console."""


def run(ctx: Context) -> dict[str, Any]:
    """Writes the score table; returns means by reward and shares of failures."""
    config: Config = ctx.config
    table = read_table(ctx.inputs["rollouts"], "rollouts/", CompletionRow, SEEN)
    # A trajectory in several parts has one reward; its last part says how it ended.
    rollouts = [parts[-1] for parts in by_trajectory(table)]
    names = sorted(config.rewards)
    functions = [config.rewards[name].function for name in names]
    about_code = code_can_reach(ctx, functions)
    columns = outcomes_of(ctx, names, rollouts)
    if not ctx.is_primary:
        return {}
    scales = _scales(ctx, columns)
    rows = with_totals(config, rollouts, columns, scales)
    write_table(ctx.out / "scores" / "part-00000.parquet", rows, ScoreRow.schema(names))
    if RUNS_CODE in functions:
        values = [[outcome.value for outcome in columns[name]] for name in names]
        about_code["suspect_code"] = suspect_code(functions, values, [row.text for row in rollouts])
    return summarise(rows, columns) | about_code


def _parts(config: Config) -> list[Part]:
    from rlhf.tuning.rewards.totals import Part

    return [Part(name, **reward.part) for name, reward in sorted(config.rewards.items())]


def _shaped(columns: Columns, parts: Sequence[Part]) -> Columns:
    """The outcomes with shaped values."""
    from rlhf.tuning.rewards.totals import shaped

    def one(outcome: Outcome, part: Part) -> Outcome:
        return outcome if outcome.value is None else Outcome(shaped(outcome.value, part), outcome.failure)

    return {part.name: [one(outcome, part) for outcome in columns[part.name]] for part in parts}


def _scales(ctx: Context, columns: Columns) -> dict[str, Scale]:
    """Mean and deviation of the rewards that are normalised over the round.

    Those of the round's own scores are written to `scale.json`, where refills and greedy completions find them.
    """
    from rlhf.tuning.rewards.totals import scales_of

    config: Config = ctx.config
    if config.round_scale:
        kept = json.loads(ctx.inputs["scale"].local(SCALE).read_bytes())
        return {name: (mean, deviation) for name, (mean, deviation) in kept.items()}
    parts = _parts(config)
    scales = scales_of(list(_shaped(columns, parts).values()), parts, config.unscored)
    if scales:
        (ctx.out / SCALE).write_text(json.dumps(scales, sort_keys=True) + "\n")
    return scales


def with_totals(
    config: Config, rollouts: Sequence[CompletionRow], columns: Columns, scales: Mapping[str, Scale]
) -> list[ScoreRow]:
    """The score table: shaped rewards, their weighted sum and the failures, in the order of the rollouts."""
    from rlhf.tuning.rewards.totals import totals

    parts = _parts(config)
    values = _shaped(columns, parts)
    sums, failures = totals(list(values.values()), parts, numbers_of_groups(rollouts), config.unscored, scales)
    rows = []
    for i, (row, total) in enumerate(zip(rollouts, sums.tolist(), strict=True)):
        rewards = {name: column[i].value for name, column in values.items()}
        # The total is NaN where a reward failed and its `on_failure` is `drop`, or where none applies.
        kept = None
        if math.isfinite(total) and row.stop != FAILED:
            kept = 0.0 if config.truncated == "zero" and row.stop == "length" else total
        rows.append(
            ScoreRow(
                place=row.place,
                sample=row.sample,
                prompt_id=row.prompt_id,
                rewards=rewards,
                total=kept,
                failure=NO_END if row.stop == FAILED else failures[i],
            )
        )
    return rows


def summarise(rows: Sequence[ScoreRow], columns: Columns) -> dict[str, Any]:
    """Means by reward; shares of completions that failed, to which nothing applies, and of groups that all tie.

    `failures` counts the commonest reasons, each behind the name of its reward. What has no number is None: without a
    scored group no share of them ties.
    """
    import numpy as np

    if not rows:
        return {"completions": 0}
    totals = [row.total for row in rows if row.total is not None]
    groups = {place: mine for place, mine in totals_by_place(rows).items() if mine}
    reasons = {f"{name}: {reason}": n for name in columns for reason, n in tallied(columns[name]).reasons.items()}
    metrics: dict[str, Any] = {
        "completions": len(rows),
        "failed": sum(row.failure is not None for row in rows) / len(rows),
        "failures": dict(sorted(reasons.items(), key=lambda item: -item[1])[:MOST]),
        "unscored": sum(not any(o.applies for o in row) for row in zip(*columns.values(), strict=True)) / len(rows),
        "reward": float(np.mean(totals)) if totals else None,
        "spread": float(np.std(totals)) if totals else None,
        "zero_variance": (len(groups) - len(informative_places(groups))) / len(groups) if groups else None,
    }
    for name in columns:
        values = [value for row in rows if (value := row.rewards[name]) is not None]
        metrics[f"reward_{name}"] = float(np.mean(values)) if values else None
    return metrics


def _total(metrics: Mapping[str, Any]) -> str:
    """The mean total, also where there is none: a line without it would hide that."""
    return f"reward {_number(metrics.get('reward'))}"


def _by_name(metrics: Mapping[str, Any]) -> str:
    """The mean of each reward by its name, where there are several: of one alone the total is told."""
    prefix = "reward_"
    means = {k.removeprefix(prefix): v for k, v in sorted(metrics.items()) if k.startswith(prefix)}
    if len(means) == 1:
        return ""
    return "  ".join(f"{name} {_number(value)}" for name, value in means.items())


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _failed(metrics: Mapping[str, Any]) -> str:
    """The shares without a reward, where there are any, and the commonest reason."""
    shown = []
    if failed := metrics.get("failed"):
        reason = textwrap.shorten(next(iter(metrics.get("failures") or {}), ""), REASON_WIDTH, placeholder=" …")
        shown.append(f"failed {failed:.2f}" + (f" ({reason})" if reason else ""))
    if unscored := metrics.get("unscored"):
        shown.append(f"no reward applies {unscored:.2f}")
    return "  ".join(shown)


STAGE = Stage(
    "score",
    1,
    Config,
    run,
    sources=source_digests,
    computes=lambda config: config.learned,
    processes=lambda config: "all" if config.learned else "primary",
    work="score",
    section="rl.score",
    title="scores",
    makes="scores",
    reads={
        "rollouts": Reads("rollouts"),
        "reward": Reads("reward", when=lambda c, _: bool(c.of_run)),
        "tokenizer": Reads("tokenizer", ("tokenizer/",), when=lambda c, _: bool(c.of_run)),
        "scorers": Reads("scorer_*", when=lambda c, _: bool(c.ready)),
        "scale": Reads("scale", (SCALE,), when=lambda c, _: c.round_scale),
    },
    headline=(_total, _by_name, _failed, "zero-var {zero_variance:.2f}"),
)

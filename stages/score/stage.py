"""Scores of one round's rollouts: each reward by name, and their weighted sum. Samples nothing."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.stages.common.sandboxed_code import RUNS_CODE, code_can_reach, suspect_code
from rlhf.stages.contract.definition import Context, Reads, Stage
from rlhf.stages.sampling.episode_tables import FAILED
from rlhf.stages.sampling.groups import informative_places, read_trajectories, totals_by_place
from rlhf.stages.score.outcomes import Columns, outcomes_of
from rlhf.stages.score.settings import Config, source_digests
from rlhf.tuning.rewards.failures import MOST, tallied
from rlhf.tuning.rewards.samples import Outcome
from rlhf.tuning.rows import CompletionRow, ScoreRow, numbers_of_groups, write_table

# Columns of a rollout that rewards see.
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
    """Write the score table; return means by reward and shares of failures."""
    config: Config = ctx.config
    # A trajectory in several parts has one reward; its last part says how it ended.
    rollouts = [parts[-1] for parts in read_trajectories(ctx.inputs["rollouts"], SEEN)]
    names = sorted(config.rewards)
    functions = [config.rewards[name].function for name in names]
    about_code = code_can_reach(ctx, functions)
    columns = outcomes_of(ctx, names, rollouts)
    if not ctx.is_primary:
        return {}
    rows = with_totals(ctx, rollouts, columns)
    write_table(ctx.out / "scores" / "part-00000.parquet", rows, ScoreRow.schema(names))
    if RUNS_CODE in functions:
        values = [[outcome.value for outcome in columns[name]] for name in names]
        about_code["suspect_code"] = suspect_code(functions, values, [row.text for row in rollouts])
    return summarise(rows, columns) | about_code


def with_totals(ctx: Context, rollouts: Sequence[CompletionRow], columns: Columns) -> list[ScoreRow]:
    """Return the score table, in the order of the rollouts: shaped rewards, their weighted sum and the failures.

    `scale.json` receives the mean and deviation of rewards that are normalised over the round, for the scores of its
    refills and greedy completions.
    """
    from rlhf.tuning.rewards.totals import Part, scales_of, shaped, totals

    config: Config = ctx.config
    parts = [Part(name, **reward.part) for name, reward in sorted(config.rewards.items())]
    values = [
        [o if o.value is None else Outcome(shaped(o.value, part), o.failure) for o in columns[part.name]]
        for part in parts
    ]
    if config.round_scale:
        scales = json.loads(ctx.inputs["scale"].local(SCALE).read_bytes())
    elif scales := scales_of(values, parts, config.unscored):
        (ctx.out / SCALE).write_text(json.dumps(scales, sort_keys=True) + "\n")
    sums, failures = totals(values, parts, numbers_of_groups(rollouts), config.unscored, scales)
    rows = []
    for i, (row, total) in enumerate(zip(rollouts, sums.tolist(), strict=True)):
        # The total is NaN if a reward failed and its `on_failure` is `drop`, or if none applies.
        kept = None
        if math.isfinite(total) and row.stop != FAILED:
            kept = 0.0 if config.truncated == "zero" and row.stop == "length" else total
        rows.append(
            ScoreRow(
                place=row.place,
                sample=row.sample,
                prompt_id=row.prompt_id,
                rewards={part.name: column[i].value for part, column in zip(parts, values, strict=True)},
                total=kept,
                failure=NO_END if row.stop == FAILED else failures[i],
            )
        )
    return rows


def summarise(rows: Sequence[ScoreRow], columns: Columns) -> dict[str, Any]:
    """Return means by reward, and shares of failed and unscored completions and of groups that tie.

    `failures` counts the commonest reasons, each after the name of its reward. Without a scored group their share is
    None.
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


def _means(metrics: Mapping[str, Any]) -> str:
    """Format the mean total, and the mean of each reward if there are several."""
    prefix = "reward_"
    means = {k.removeprefix(prefix): v for k, v in sorted(metrics.items()) if k.startswith(prefix)}
    shown = {"reward": metrics.get("reward")} | (means if len(means) > 1 else {})
    # A line without the mean would hide that there is none.
    return "  ".join(f"{name} {'none' if value is None else f'{value:.3f}'}" for name, value in shown.items())


def _failed(metrics: Mapping[str, Any]) -> str:
    """Format the shares without a reward that are above 0, and the commonest reason."""
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
    headline=(_means, _failed, "zero-var {zero_variance:.2f}"),
)

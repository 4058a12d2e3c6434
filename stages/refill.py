"""Further prompts of a round, in place of those whose completions all score alike (DAPO, arXiv:2503.14476).

A refill samples as many new prompts as it expects to need and leaves its table empty where nothing is missing. The
update takes the first informative groups in order; `chosen_groups` accounts for all others.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field

from stages.base import Context
from stages.rollout import Config as RolloutConfig
from stages.rollout import sample_rows, schema
from stages.tables import read_rows, write_rows

NAME = "refill"
VERSION = 1

LEAST_SHARE = 0.25
"""A refill expects at least this share of its prompts to be informative: it stays small."""
LEAST_SPREAD = 1e-6


class Config(RolloutConfig):
    """Sampling as in the round's rollouts."""

    number: Annotated[int, Field(ge=1)] = 1
    """Which refill of the round this is."""


class TooFewGroups(RuntimeError):
    """All refills together left fewer informative groups than the round wants."""


def by_prompt(rollouts: list[dict[str, Any]], scores: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The totals of each prompt's completions, those of failed rewards left out."""
    found: dict[str, list[float]] = {}
    for row, score in zip(rollouts, scores, strict=True):
        mine = found.setdefault(row["prompt_id"], [])
        if score["total"] is not None:
            mine.append(score["total"])
    return found


def informative(totals: list[float]) -> bool:
    """Whether a group teaches anything (R9)."""
    return len(totals) > 1 and max(totals) - min(totals) >= LEAST_SPREAD


def chosen_groups(
    rollouts: list[dict[str, Any]], scores: list[dict[str, Any]], wanted: int, when_short: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Rows of the first `wanted` informative groups, and what became of each prompt.

    Raises TooFewGroups with the histogram of pass rates where there are fewer and `when_short` is `stop`.
    """
    groups = by_prompt(rollouts, scores)
    good = [p for p, totals in groups.items() if informative(totals)]
    if len(good) < wanted and when_short == "stop":
        raise TooFewGroups(
            f"{len(good)} of the {wanted} groups that the round wants are informative, after {len(groups)} prompts; "
            f"prompts by share of better completions, 0 to 1: {_histogram(groups)}. Use prompts that are neither too "
            "hard nor too easy, raise rl.refills or rl.rollout.completions, or set rl.update.short_of_groups: train"
        )
    taken = set(good[:wanted])
    keep = [i for i, r in enumerate(rollouts) if r["prompt_id"] in taken]
    about = {
        "prompts_sampled": len(groups),
        "prompts_without_signal": len(groups) - len(good),
        "prompts_to_spare": len(good) - len(taken),
    }
    return [rollouts[i] for i in keep], [scores[i] for i in keep], about


def _histogram(groups: dict[str, list[float]], bins: int = 5) -> list[int]:
    totals = [t for mine in groups.values() for t in mine]
    counts = [0] * bins
    middle = (min(totals) + max(totals)) / 2 if totals else 0.0
    for mine in groups.values():
        if mine:
            counts[min(bins - 1, int(sum(t > middle for t in mine) / len(mine) * bins))] += 1
    return counts


def missing_prompts(groups: dict[str, list[float]], wanted: int) -> int:
    """How many new prompts are worth sampling, from the share that was informative so far; at most `wanted`."""
    good = sum(map(informative, groups.values()))
    share = max(good / max(len(groups), 1), LEAST_SHARE)
    return min(wanted, math.ceil(max(wanted - good, 0) / share))


def run(ctx: Context) -> dict[str, Any]:
    import numpy as np

    from tuning.rollout.sampling import Sampling

    config: Config = ctx.config
    rollouts, scores = read_rows(ctx.inputs["rollouts"], "rollouts/"), read_rows(ctx.inputs["scores"], "scores/")
    for i in range(1, config.number):
        rollouts += read_rows(ctx.inputs[f"refill_{i}"], "rollouts/")
        scores += read_rows(ctx.inputs[f"refill_{i}_scores"], "scores/")
    groups = by_prompt(rollouts, scores)
    table = [r for r in read_rows(ctx.inputs["data"], "prompts/") if r["id"] not in groups]
    order = np.random.default_rng(ctx.seed).permutation(len(table))
    wanted = missing_prompts(groups, config.prompts)
    chosen = [table[i] for i in order[:wanted]]
    if not chosen:
        write_rows(ctx.out / "rollouts" / "part-00000.parquet", [], schema())
        return {"prompts": 0, "completions": 0, "tokens": 0}
    rows = sample_rows(
        ctx,
        chosen,
        samples=config.completions,
        max_tokens=config.max_tokens,
        sampling=Sampling(temperature=config.temperature),
        shard=config.shard_prompts,
    )
    tokens = sum(len(r["token_ids"]) for r in rows)
    return {"prompts": len(chosen), "completions": len(rows), "tokens": tokens}

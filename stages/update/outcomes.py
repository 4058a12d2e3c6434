"""The fate of each completion of a round in its update: trained, or left out for a reason (R16, R24)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from rlhf.stages.sampling.groups import Scored
from rlhf.tuning.rows import CompletionRow, FateRow, ScoreRow

if TYPE_CHECKING:
    from rlhf.tuning.algorithms.rounds import RoundResult

FATES = "fates"
"""The folder of an update that holds the table."""
VARIED = "the totals of other groups vary more (keep_most_varied)"
TIED = "the rewards of its group are equal"
COUNTED = f"{TIED}: it counts in denominators, KL and entropy alone"
NO_BASELINE = "the greedy completion of its prompt, the baseline, has no reward"


def fates_of(
    sampled: Scored, chosen: Scored, result: RoundResult, truncated: str, greedy_N: np.ndarray | None = None
) -> list[FateRow]:
    """Return one row for each completion, in the order of sampling.

    sampled: all of the round and its refills. chosen: those that the round trains on, in the order of the result's
    arrays. truncated: the setting of that name. greedy_N: the baseline of each chosen completion if it is the reward of
    its prompt's greedy completion, NaN without one.
    """
    numbers = {(row.place, row.sample): number for number, row in enumerate(chosen.rollouts)}
    teaching = {row.place for row, signal in zip(chosen.rollouts, result.signal_N, strict=True) if signal}

    def fate(rollout: CompletionRow, score: ScoreRow, number: int | None) -> tuple[str, str | None]:
        if number is not None and result.trained_N[number]:
            return "trained", None if result.signal_N[number] else COUNTED
        if score.total is None or rollout.stop == "failed":
            reason = "its episode failed" if rollout.stop == "failed" else "no reward applies to it"
            return "failed", score.failure or reason
        if number is None:
            return "spare", f"{TIED}, or the round has as many groups as it wants without it"
        if result.filtered_N[number]:
            return "filtered", VARIED
        if truncated != "keep" and rollout.stop == "length":
            return "truncated", "it was cut off at max_tokens, and such completions are masked"
        if greedy_N is not None and not np.isfinite(greedy_N[number]):
            return "unchosen", NO_BASELINE
        if rollout.place not in teaching:
            return "tied", TIED
        return "unchosen", "the algorithm trains on other completions of its group"

    rows = []
    for rollout, score in zip(sampled.rollouts, sampled.scores, strict=True):
        number = numbers.get((rollout.place, rollout.sample))
        what, reason = fate(rollout, score, number)
        advantage = float(result.advantages_N[number]) if number is not None and what == "trained" else math.nan
        rows.append(
            FateRow(
                place=rollout.place,
                sample=rollout.sample,
                prompt_id=rollout.prompt_id,
                fate=what,
                reason=reason,
                advantage=None if math.isnan(advantage) else advantage,
            )
        )
    return rows

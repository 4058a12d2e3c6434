"""What became of each completion of a round, so that every one has a score and one fate with a reason.

trained       in the loss
regularised   in the loss for the KL and the entropy bonus alone: the rewards of its group do not differ
failed        has no reward
truncated     was cut off at max_tokens and is masked
tied          the rewards of its group do not differ
left out      the algorithm's own rule does not take it
spare         in a group beyond those that the round wants, which refills may give
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stages.sampling.groups import Scored, informative_places, totals_by_place
from tuning.rows import FateRow, ScoreRow

if TYPE_CHECKING:
    from tuning.algorithms.selection import Fates

NO_REWARD = "no reward applies"
REASONS = {
    "trained": None,
    "regularised": "the rewards of its group do not differ; it stays for the KL and the entropy bonus",
    "truncated": "cut off at max_tokens",
    "tied": "the rewards of its group do not differ",
    "left out": "the algorithm does not take it",
    "spare": "the round has as many groups as it wants without this one",
}


def fates_of(every: Scored, taken: Scored, found: Fates) -> list[FateRow]:
    """A row for each completion of the round and its refills, in the order of their tables.

    taken: those of `every` that the update was given; found: their fates, in the same order.
    """
    known = {
        (score.place, score.sample): (fate, advantage)
        for score, fate, advantage in zip(taken.scores, found.names, found.advantages, strict=True)
    }
    spare = set(informative_places(totals_by_place(every.scores)))
    rows = []
    for score in every.scores:
        # Of a group that was not taken: what keeps it from teaching comes first.
        otherwise = "spare" if score.place in spare else "tied"
        fate, advantage = known.get((score.place, score.sample), (otherwise, None))
        rows.append(_row(score, "failed" if score.total is None else fate, advantage))
    return rows


def _row(score: ScoreRow, fate: str, advantage: float | None) -> FateRow:
    reason = score.failure or NO_REWARD if fate == "failed" else REASONS[fate]
    return FateRow(
        place=score.place,
        sample=score.sample,
        prompt_id=score.prompt_id,
        fate=fate,
        reason=reason,
        advantage=advantage,
    )


def counts(rows: Sequence[FateRow]) -> dict[str, int]:
    """Completions by fate."""
    found: dict[str, int] = {}
    for row in rows:
        found[row.fate] = found.get(row.fate, 0) + 1
    return dict(sorted(found.items()))

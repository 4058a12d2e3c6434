"""The figures of an evaluation that follow from its completions and verdicts, of all its problems or of some."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from rlhf.tuning.rows import CompletionRow, VerdictRow

READ = ("place", "sample", "token_ids", "stop")
"""The fields of a completion that they read."""

_OF_VERDICTS = ("score", "score_low", "score_high", "score_of_ended", "answered", "judges")
_NAMES = (
    *_OF_VERDICTS,
    *("mean_length", "truncated"),
    *("judge_failures", "not_applicable", "problems", "samples", "constant_answer", "constant_score", "levels"),
    *("statuses", "failed_episodes", "success", "success_guessed", "turns", "valid_turns", "calling", "failed_calls"),
    *("sampled_tokens", "observed_tokens", "code_can_reach"),
)


def is_figure(name: str) -> bool:
    """Whether an evaluation may have a figure of this name, which no judge can have then."""
    return name in _NAMES or is_of_verdicts(name)


def is_of_verdicts(name: str) -> bool:
    """Whether a figure of this name follows from the verdicts; where none has a score there is none."""
    return name in _OF_VERDICTS or re.fullmatch(r"(pass|maj)_at_\d+", name) is not None


def figures(
    judges: Sequence[str], samples: int, rows: Sequence[CompletionRow], verdicts: Sequence[VerdictRow]
) -> dict[str, Any]:
    """Lengths, each judge's scores, and of the deciding judge also pass@k, maj@n and shares of answers.

    judges: their names in the verdicts, the one that decides first. samples: of each problem. rows and verdicts: those
    of the same problems, of at least one.
    """
    from rlhf.tuning.evaluation.verdicts import judged, score_of, summary

    by_judge: dict[str, list[VerdictRow]] = {name: [] for name in judges}
    for verdict in verdicts:
        by_judge[verdict.judge].append(verdict)
    decides = by_judge[judges[0]]
    found: dict[str, Any] = {
        "mean_length": sum(len(row.token_ids) for row in rows) / len(rows),
        "truncated": sum(row.stop == "length" for row in rows) / len(rows),
    }
    of_first = judged(decides, samples)
    found |= summary(of_first) if of_first.problems else of_first.score()
    # Beside the score: a policy that is only cut off, or never ends, may know the answers.
    cut = {(row.place, row.sample) for row in rows if row.stop == "length"}
    ended = [score for v in decides if (v.place, v.sample) not in cut and not math.isnan(score := score_of(v))]
    found["score_of_ended"] = sum(ended) / len(ended) if ended else None
    if further := {name: judged(by_judge[name], samples).score() for name in judges[1:]}:
        found["judges"] = further
    return found

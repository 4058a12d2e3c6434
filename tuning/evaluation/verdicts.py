"""The verdict table of an evaluation as arrays, its scores, and the paired difference of two policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlhf.tuning.evaluation.statistics import (
    majority,
    mean_interval,
    paired_difference,
    paired_gaps,
    pass_at_k,
    problem_means,
)
from rlhf.tuning.rows import VerdictRow


@dataclasses.dataclass(frozen=True)
class Judged:
    """Verdicts of one judge on each completion of each problem, problems in the order of their places."""

    places: list[int]
    groups: list[str]
    """The group of each problem: problems of one group are resampled together."""
    correct_PS: np.ndarray
    """Scores, [problems, samples]: 0 if the judge failed, NaN if it does not apply."""
    answers_PS: list[list[str | None]]
    failed_PS: np.ndarray
    """Where the judge failed, [problems, samples]."""

    @property
    def problems(self) -> int:
        """Problems to which the judge applies."""
        return int(np.isfinite(problem_means(self.correct_PS)).sum())

    def at(self, rows: Sequence[int]) -> Judged:
        """The verdicts of some problems, by their numbers in this table."""
        return Judged(
            [self.places[i] for i in rows],
            [self.groups[i] for i in rows],
            self.correct_PS[rows],
            [self.answers_PS[i] for i in rows],
            self.failed_PS[rows],
        )

    def score(self) -> dict[str, Any]:
        """The mean score with its interval, and how many judgements failed or problems have none."""
        found: dict[str, Any] = {
            "judge_failures": int(self.failed_PS.sum()),
            "not_applicable": len(self.places) - self.problems,
        }
        if self.problems:
            mean, low, high = mean_interval(self.correct_PS, clusters=self.groups)
            found |= {"score": mean, "score_low": low, "score_high": high}
        return found


def judged(verdicts: Iterable[VerdictRow], samples: int) -> Judged:
    """The verdicts of one judge, `samples` of each problem."""
    by_place: dict[int, dict[int, VerdictRow]] = {}
    for verdict in verdicts:
        by_place.setdefault(verdict.place, {})[verdict.sample] = verdict
    table = [[by_place[place][s] for s in range(samples)] for place in sorted(by_place)]
    scores = [[score_of(verdict) for verdict in problem] for problem in table]
    failures = [[verdict.failure is not None for verdict in problem] for problem in table]
    return Judged(
        sorted(by_place),
        [problem[0].group for problem in table],
        np.asarray(scores, np.float64).reshape(len(table), samples),
        [[verdict.answer for verdict in problem] for problem in table],
        np.asarray(failures, bool).reshape(len(table), samples),
    )


def score_of(verdict: VerdictRow) -> float:
    """Return 0 if the judge failed: a policy must not gain by breaking its judge; NaN if it does not apply."""
    if verdict.score is not None:
        return verdict.score
    return 0.0 if verdict.failure is not None else float("nan")


def summary(of: Judged) -> dict[str, Any]:
    """Score, pass@1 to pass@n and maj@n of the judge that decides, and the share of completions with an answer."""
    samples = of.correct_PS.shape[1]
    rates: dict[str, Any] = {f"pass_at_{k}": _pass_at(of, k) for k in range(1, samples + 1)}
    if samples > 1:
        rates[f"maj_at_{samples}"] = majority(of.correct_PS, of.answers_PS)
    answered = [answer is not None for answers in of.answers_PS for answer in answers]
    return of.score() | rates | {"answered": sum(answered) / len(answered)}


def _pass_at(of: Judged, k: int) -> float | None:
    """None where no problem has k scores."""
    enough = (np.isfinite(of.correct_PS).sum(axis=1) >= k).any()
    return pass_at_k(of.correct_PS, k) if enough else None


@dataclasses.dataclass(frozen=True)
class Difference:
    """How much better the second of two policies is on the problems that both were judged on."""

    mean: float
    low: float
    high: float
    problems: int
    """Those with a score on both sides."""

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or `even` where the interval holds 0."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else "even"


def difference(before: Judged, after: Judged) -> Difference:
    """Compare after - before by problem, joined by place (R21). Raises ValueError if they share no problem."""
    rows = {place: i for i, place in enumerate(before.places)}
    shared = [(rows[place], j) for j, place in enumerate(after.places) if place in rows]
    old, new = before.at([i for i, _ in shared]), after.at([j for _, j in shared])
    if old.groups != new.groups:
        raise ValueError("the two evaluations are of different problems: evaluate both policies on the same data")
    mean, low, high = paired_difference(old.correct_PS, new.correct_PS, clusters=new.groups)
    gaps, _ = paired_gaps(old.correct_PS, new.correct_PS, None)
    return Difference(mean, low, high, len(gaps))


def without_gain(before: Judged, after: Judged) -> tuple[np.ndarray, np.ndarray, int]:
    """(before, after, how many) scores, [problems, samples], in which a missing score never helps the second.

    Where the judge failed on the first, its sample is left out: a busy night of the judge is no ability of the second.
    Where it failed on the second, or does not apply to it though the problem has a score of the first, the second has
    the lowest score that either has, 0 at most; the number says of how many samples of compared problems that holds.
    """
    old_PS = np.where(before.failed_PS, np.nan, before.correct_PS)
    known = np.concatenate([old_PS.ravel(), after.correct_PS[~after.failed_PS].ravel(), [0.0]])
    compared = np.isfinite(problem_means(old_PS))[:, None]
    lost_PS = compared & (after.failed_PS | np.isnan(after.correct_PS))
    return old_PS, np.where(lost_PS, np.nanmin(known), after.correct_PS), int(lost_PS.sum())

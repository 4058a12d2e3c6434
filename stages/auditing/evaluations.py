"""Laws of evaluations: all policies answer the same problems, and every number follows from the verdicts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from rlhf.stages.auditing.laws import Finding, Law, close
from rlhf.stages.auditing.run import Evaluated
from rlhf.tuning.rows import VerdictRow

ROUNDING = 1e-6
"""Scores are stored as float32."""

Sample = tuple[str | None, float | None]
"""A vote, and what the judge gives it: 0 where it failed, None where it does not apply."""


def same_problems(evaluated: Evaluated, finding: Finding) -> None:
    """Every policy is asked the same held-out prompts, token by token, at the same places."""
    first, asked = evaluated.run.first_asked
    finding.check(evaluated.asked == asked, f"{evaluated.name} and {first} were asked different problems")


def scores_are_means(evaluated: Evaluated, finding: Finding) -> None:
    """Each judge's score is the mean over problems of the mean over their samples; its verdicts are of each completion.

    What failed counts as 0; what the judge does not apply to leaves the means.
    """
    config, metrics = evaluated.artifact.manifest["config"], evaluated.artifact.metrics
    sampled = Counter({(row.place, row.sample) for row in evaluated.rows})
    for name in (config["judge"], *config.get("judges", {})):
        mean = _mean(_mean(score for _, score in samples) for samples in _problems(evaluated, name))
        stored = (metrics if name == config["judge"] else metrics["judges"][name]).get("score")
        case = f"{evaluated.name}: {name} has the score {stored}, its verdicts give {mean}"
        finding.check(close(stored, mean, ROUNDING, ROUNDING), case)
        judged = Counter((row.place, row.sample) for row in evaluated.verdicts if row.judge == name)
        if judged != sampled:
            verdicts = f"{judged.total()} verdicts for {sampled.total()} completions"
            finding.broken.append(f"{evaluated.name}: {name} has {verdicts}")


def _problems(evaluated: Evaluated, judge: str) -> list[list[Sample]]:
    """The votes and scores of the samples of each problem."""
    found: dict[int, list[Sample]] = {}
    for row in evaluated.verdicts:
        if row.judge == judge:
            found.setdefault(row.place, []).append((row.answer, _score(row)))
    return list(found.values())


def _score(row: VerdictRow) -> float | None:
    return 0.0 if row.failure is not None else row.score


def _mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are there; None where none is."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def rates_follow(evaluated: Evaluated, finding: Finding) -> None:
    """pass@k, maj@n and shares of the judge that decides, computed anew; `scores.json` has the metrics."""
    artifact = evaluated.artifact
    config, metrics = artifact.manifest["config"], artifact.metrics
    problems = _problems(evaluated, config["judge"])
    samples = config["samples"]
    expected = {f"pass_at_{k}": _mean(_pass(problem, k) for problem in problems) for k in range(1, samples + 1)}
    if samples > 1:
        expected[f"maj_at_{samples}"] = _mean(_majority(problem) for problem in problems)
    expected["answered"] = _mean(float(vote is not None) for problem in problems for vote, _ in problem)
    cut = {(row.place, row.sample) for row in evaluated.rows if row.stop == "length"}
    verdicts = [row for row in evaluated.verdicts if row.judge == config["judge"]]
    expected["score_of_ended"] = _mean(_score(row) for row in verdicts if (row.place, row.sample) not in cut)
    for name, value in expected.items():
        case = f"{evaluated.name}: {name} is {metrics.get(name)}, its verdicts give {value}"
        finding.check(close(metrics.get(name), value, ROUNDING, ROUNDING), case)
    if artifact.has("scores.json"):
        # What a choice among policies goes by.
        same = json.loads(artifact.local("scores.json").read_bytes()) == json.loads(json.dumps(metrics))
        if not same:
            finding.broken.append(f"{evaluated.name}: scores.json has other numbers than the manifest")


def _pass(problem: Sequence[Sample], k: int) -> float | None:
    """The share of the choices of k samples in which one is right; None where fewer than k have a score."""
    right = [score > 0.5 for _, score in problem if score is not None]
    return None if len(right) < k else 1 - math.comb(right.count(False), k) / math.comb(len(right), k)


def _majority(problem: Sequence[Sample]) -> float | None:
    """The mean score of the commonest votes, each with an equal share; 0 where nobody votes."""
    judged = [(vote, score) for vote, score in problem if score is not None]
    votes = [vote for vote, _ in judged if vote is not None]
    if not votes:
        return 0.0 if judged else None
    most = max(votes.count(vote) for vote in votes)
    winners = sorted({vote for vote in votes if votes.count(vote) == most})
    return _mean(_mean(score for vote, score in judged if vote == winner) for winner in winners)


LAWS = [
    Law("problems", "every policy answers the same problems", "policies", same_problems, "evaluations"),
    Law("evaluations", "scores are the means of their verdicts", "scores", scores_are_means, "evaluations"),
    Law("rates", "pass@k, maj@n and shares follow from the verdicts", "rates", rates_follow, "evaluations"),
]

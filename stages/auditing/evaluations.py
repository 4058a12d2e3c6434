"""Laws of evaluations: all policies answer the same problems, and every number follows from the verdicts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from rlhf.stages.auditing.laws import Finding, Law, close
from rlhf.stages.auditing.run import Completions, name_of
from rlhf.tuning.rows import VerdictRow

ROUNDING = 1e-6
"""Scores are stored as float32."""

Sample = tuple[str | None, float | None]
"""A vote and its score: 0 if the judge failed, None if it does not apply."""


def check_problems(evaluated: Completions, finding: Finding) -> None:
    """Every policy is asked the same held-out prompts, token by token, at the same places."""
    first, asked = evaluated.run.first_asked
    finding.check(evaluated.asked == asked, f"{evaluated.name} and {first} were asked different problems")


def check_scores(evaluated: Completions, finding: Finding) -> None:
    """Each judge's score is the mean over problems of the mean over samples; it has a verdict on each completion.

    A failure counts as 0; samples to which the judge does not apply leave the means.
    """
    config, metrics = evaluated.config, evaluated.artifact.metrics
    sampled = Counter(evaluated.parts.keys())
    for name in (config["judge"], *config.get("judges", {})):
        mean = _mean(_mean(score for _, score in samples) for samples in _problems(evaluated, name))
        stored = (metrics if name == config["judge"] else metrics["judges"][name]).get("score")
        case = f"{evaluated.name}: {name} has the score {stored}, its verdicts give {mean}"
        finding.check(close(stored, mean, ROUNDING, ROUNDING), case)
        judged = Counter(name_of(row) for row in evaluated.verdicts if row.judge == name)
        if judged != sampled:
            verdicts = f"{judged.total()} verdicts for {sampled.total()} completions"
            finding.broken.append(f"{evaluated.name}: {name} has {verdicts}")


def _problems(evaluated: Completions, judge: str) -> list[list[Sample]]:
    """Return the votes and scores of the samples of each problem."""
    problems: dict[int, list[Sample]] = {}
    for row in evaluated.verdicts:
        if row.judge == judge:
            problems.setdefault(row.place, []).append((row.answer, _score(row)))
    return list(problems.values())


def _score(row: VerdictRow) -> float | None:
    return 0.0 if row.failure is not None else row.score


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None without any."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def check_rates(evaluated: Completions, finding: Finding) -> None:
    """pass@k, maj@n and shares of the deciding judge follow from its verdicts; `scores.json` has the metrics."""
    artifact, config, metrics = evaluated.artifact, evaluated.config, evaluated.artifact.metrics
    problems, samples = _problems(evaluated, config["judge"]), config["samples"]
    expected = {f"pass_at_{k}": _mean(_pass(problem, k) for problem in problems) for k in range(1, samples + 1)}
    if samples > 1:
        expected[f"maj_at_{samples}"] = _mean(map(_majority, problems))
    expected["answered"] = _mean(float(vote is not None) for problem in problems for vote, _ in problem)
    cut = {name_of(row) for row in evaluated.rows if row.stop == "length"}
    verdicts = [row for row in evaluated.verdicts if row.judge == config["judge"]]
    expected["score_of_ended"] = _mean(_score(row) for row in verdicts if name_of(row) not in cut)
    for name, value in expected.items():
        case = f"{evaluated.name}: {name} is {metrics.get(name)}, its verdicts give {value}"
        finding.check(close(metrics.get(name), value, ROUNDING, ROUNDING), case)
    # Checkpoint selection reads this file.
    if artifact.has("scores.json"):
        same = json.loads(artifact.local("scores.json").read_bytes()) == json.loads(json.dumps(metrics))
        if not same:
            finding.broken.append(f"{evaluated.name}: scores.json has other numbers than the manifest")


def _pass(problem: Sequence[Sample], k: int) -> float | None:
    """Return the share of the choices of k samples that contain a correct one; None with fewer than k scores."""
    right = [score > 0.5 for _, score in problem if score is not None]
    return None if len(right) < k else 1 - math.comb(right.count(False), k) / math.comb(len(right), k)


def _majority(problem: Sequence[Sample]) -> float | None:
    """Return the mean score of the commonest votes, each with an equal share; 0 without votes."""
    judged = [(vote, score) for vote, score in problem if score is not None]
    votes = Counter(vote for vote, _ in judged if vote is not None)
    if not votes:
        return 0.0 if judged else None
    winners = [vote for vote, count in votes.items() if count == max(votes.values())]
    return _mean(_mean(score for vote, score in judged if vote == winner) for winner in winners)


LAWS = [
    Law("problems", "every policy answers the same problems", "policies", check_problems, "evaluations"),
    Law("evaluations", "scores are the means of their verdicts", "scores", check_scores, "evaluations"),
    Law("rates", "pass@k, maj@n and shares follow from the verdicts", "rates", check_rates, "evaluations"),
]

"""Laws of evaluations: all policies answer the same problems, and every number follows from the verdicts."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from stages.auditing.laws import Finding, Law, OfEvaluations
from stages.auditing.run import AuditedRun, Evaluated, tokens_digest
from tuning.rows import CompletionRow, VerdictRow

ROUNDING = 1e-6
"""Scores are stored as float32."""
MOST_CHOICES = 5_000
"""Choices of k among n samples that are gone through one by one."""

Sample = tuple[str | None, float | None]
"""A vote, and what the judge gives it: 0 where it failed, None where it does not apply."""


def same_problems(run: AuditedRun) -> OfEvaluations:
    """Every policy is asked the same held-out prompts, token by token, at the same places."""
    finding = Finding("policies")
    first: tuple[str, set[tuple[int, str, bytes]]] | None = None
    while (evaluated := (yield)) is not None:
        asked = {(row.place, row.prompt_id, _asked(row)) for row in evaluated.rows}
        first = first or (evaluated.name, asked)
        finding.check(asked == first[1], f"{evaluated.name} and {first[0]} were asked different problems")
    return finding


def _asked(row: CompletionRow) -> bytes:
    """A digest of what a policy was asked; an episode that its environment failed may have no context of its own."""
    return b"" if row.stop == "failed" else tokens_digest(row.prompt_ids)


def scores_are_means(run: AuditedRun) -> OfEvaluations:
    """Each judge's score is the mean over problems of the mean over their samples; its verdicts are of each completion.

    What failed counts as 0; what the judge does not apply to leaves the means.
    """
    finding = Finding("scores")
    while (evaluated := (yield)) is not None:
        artifact = evaluated.artifact
        sampled = Counter({(row.place, row.sample) for row in evaluated.rows})
        for name in _judges(artifact.manifest["config"]):
            problems = _problems(evaluated, name)
            means = [mean for samples in problems if (mean := _mean(score for _, score in samples)) is not None]
            mean = sum(means) / len(means) if means else None
            of_judge = (
                artifact.metrics if name == artifact.manifest["config"]["judge"] else artifact.metrics["judges"][name]
            )
            stored = of_judge.get("score")
            case = f"{evaluated.name}: {name} has the score {stored}, its verdicts give {mean}"
            finding.check(_close(stored, mean), case)
            judged = Counter((row.place, row.sample) for row in evaluated.verdicts if row.judge == name)
            if judged != sampled:
                verdicts = f"{judged.total()} verdicts for {sampled.total()} completions"
                finding.broken.append(f"{evaluated.name}: {name} has {verdicts}")
    return finding


def _judges(config: dict[str, Any]) -> list[str]:
    """The names of the judges, the one that decides first."""
    return [config["judge"], *config.get("judges", {})]


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


def _close(stored: float | None, value: float | None) -> bool:
    if stored is None or value is None:
        return stored is value
    return math.isclose(stored, value, rel_tol=ROUNDING, abs_tol=ROUNDING)


def rates_follow(run: AuditedRun) -> OfEvaluations:
    """pass@k, maj@n and shares of the judge that decides, computed anew; `scores.json` has the metrics."""
    finding = Finding("rates")
    while (evaluated := (yield)) is not None:
        _rates(evaluated, finding)
    return finding


def _rates(evaluated: Evaluated, finding: Finding) -> None:
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
        finding.check(_close(metrics.get(name), value), case)
    if artifact.has("scores.json"):
        # What a choice among policies goes by.
        same = json.loads(artifact.local("scores.json").read_bytes()) == json.loads(json.dumps(metrics))
        if not same:
            finding.broken.append(f"{evaluated.name}: scores.json has other numbers than the manifest")


def _pass(problem: Sequence[Sample], k: int) -> float | None:
    """The share of the choices of k samples in which one is right; None where fewer than k have a score."""
    right = [score > 0.5 for _, score in problem if score is not None]
    if len(right) < k:
        return None
    if math.comb(len(right), k) > MOST_CHOICES:
        return 1 - math.comb(right.count(False), k) / math.comb(len(right), k)
    choices = [any(choice) for choice in itertools.combinations(right, k)]
    return sum(choices) / len(choices)


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
    Law("problems", "every policy answers the same problems", same_problems, over="evaluations"),
    Law("evaluations", "scores are the means of their verdicts", scores_are_means, over="evaluations"),
    Law("rates", "pass@k, maj@n and shares follow from the verdicts", rates_follow, over="evaluations"),
]

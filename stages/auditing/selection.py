"""Laws of the choice among policies: it is the best of those that were evaluated, and has its content."""

from __future__ import annotations

import json
from typing import Any

from rlhf.stages.auditing.laws import Finding, Law
from rlhf.stages.auditing.run import AuditedRun
from rlhf.stages.store.artifacts import NOT_CONTENT, Artifact

POLICY, EVALUATION = "candidate_", "evaluation_"
"""Roles of a choice, with the number of the round behind."""


def best_of_candidates(run: AuditedRun, finding: Finding) -> None:
    """The chosen policy has the highest metric, the earliest of equals, and every file of that candidate."""
    for name, choice in run.artifacts.items():
        if choice.stage == "select":
            _choice(run, name, choice, finding)


def _choice(run: AuditedRun, name: str, choice: Artifact, finding: Finding) -> None:
    metric, inputs = choice.manifest["config"]["metric"], choice.manifest["inputs"]
    reached: dict[int, float] = {}
    for role in inputs:
        if role.startswith(EVALUATION):
            evaluation = _input(run, choice, role)
            if evaluation is None:
                finding.left_out.append(f"{name}: {role} is gone")
                return
            reached[int(role.removeprefix(EVALUATION))] = _value(evaluation, metric)
    top = max(reached.values())
    best = min(number for number, value in reached.items() if value == top)
    chosen = choice.metrics["round"]
    case = f"{name}: round {chosen} was chosen by {metric}, of {reached} round {best} is the best"
    finding.check(chosen == best, case)
    candidate = _input(run, choice, f"{POLICY}{chosen:03d}")
    if candidate is None:
        finding.left_out.append(f"{name}: the policy of round {chosen} is gone")
        return
    wrong = sorted({path for path, _ in _content(choice) ^ _content(candidate)})
    if wrong:
        finding.broken.append(f"{name}: not the content of round {chosen}: {', '.join(wrong[:3])}")


def _input(run: AuditedRun, choice: Artifact, role: str) -> Artifact | None:
    source = choice.manifest["inputs"].get(role)
    if source is None:
        return None
    return run.store.with_digest(source["stage"], source["key"], source["digest"])


def _value(evaluation: Artifact, metric: str) -> float:
    """The number of an evaluation that a choice goes by: one of its own, or the score of a further judge."""
    scores: dict[str, Any] = json.loads(evaluation.local("scores.json").read_bytes())
    of_judge = scores.get("judges", {}).get(metric)
    return float(scores[metric] if of_judge is None else of_judge["score"])


def _content(artifact: Artifact) -> set[tuple[str, str]]:
    files = artifact.manifest["files"]
    return {(f["path"], f["sha256"]) for f in files if not f["path"].startswith(NOT_CONTENT)}


LAWS = [Law("choice", "the chosen policy is the best candidate, file by file", "choices", best_of_candidates)]

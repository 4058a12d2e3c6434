"""Laws of checkpoint selection: the selected policy is the best evaluated one, with its content."""

from __future__ import annotations

import json
from typing import Any

from rlhf.stages.auditing.laws import Finding, Law
from rlhf.stages.auditing.run import AuditedRun
from rlhf.stages.store.artifacts import NOT_CONTENT, Artifact

EVALUATION = "evaluation_"
"""Role of a candidate's evaluation; the number of the round follows."""


def check_choice(run: AuditedRun, finding: Finding) -> None:
    """The selected policy has the highest metric, the earliest of equals, and every file of that candidate."""
    for name, choice in run.artifacts.items():
        if choice.stage == "select":
            _check(run, name, choice, finding)


def _check(run: AuditedRun, name: str, choice: Artifact, finding: Finding) -> None:
    metric, chosen, inputs = choice.manifest["config"]["metric"], choice.metrics["round"], choice.manifest["inputs"]
    candidate, roles = f"candidate_{chosen:03d}", [role for role in inputs if role.startswith(EVALUATION)]
    stored = {role: a for role in (candidate, *roles) if role in inputs and (a := run.stored(inputs[role])) is not None}
    if missing := [role for role in (candidate, *roles) if role not in stored]:
        finding.left_out.append(f"{name}: {missing[0]} is gone")
        return
    values = {int(role.removeprefix(EVALUATION)): _value(stored[role], metric) for role in roles}
    best = min(number for number, value in values.items() if value == max(values.values()))
    case = f"{name}: round {chosen} was chosen by {metric}, of {values} round {best} is the best"
    finding.check(chosen == best, case)
    wrong = sorted({path for path, _ in _content(choice) ^ _content(stored[candidate])})
    if wrong:
        finding.broken.append(f"{name}: not the content of round {chosen}: {', '.join(wrong[:3])}")


def _value(evaluation: Artifact, metric: str) -> float:
    """Return the metric of an evaluation, or the score of the judge of that name."""
    scores: dict[str, Any] = json.loads(evaluation.local("scores.json").read_bytes())
    judges = scores.get("judges", {})
    return float(judges[metric]["score"] if metric in judges else scores[metric])


def _content(artifact: Artifact) -> set[tuple[str, str]]:
    files = artifact.manifest["files"]
    return {(f["path"], f["sha256"]) for f in files if not f["path"].startswith(NOT_CONTENT)}


LAWS = [Law("choice", "the selected policy is the best candidate, file by file", "choices", check_choice)]

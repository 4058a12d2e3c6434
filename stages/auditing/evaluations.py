"""Laws of evaluations: all policies answer the same problems, and scores are the means of their verdicts."""

from __future__ import annotations

import math

from stages.auditing.laws import Finding, Law
from stages.auditing.run import AuditedRun
from stages.common.tables import read_table
from tuning.rows import CompletionRow


def same_problems(run: AuditedRun) -> Finding:
    """Every policy is asked the same held-out prompts, token by token, at the same places."""
    finding = Finding("policies")
    first: tuple[str, set[tuple[int, str, tuple[int, ...]]]] | None = None
    for name, artifact in run.evaluations.items():
        rows = read_table(artifact, "rollouts/", CompletionRow)
        asked = {(row.place, row.prompt_id, tuple(row.prompt_ids)) for row in rows}
        if first is None:
            first = name, asked
        same = asked == first[1]
        finding.check(same, f"{name} and {first[0]} were asked different problems")
    return finding


def scores_are_means(run: AuditedRun) -> Finding:
    """The score is the mean over problems of the mean over their samples; what failed counts as 0, None does not."""
    finding = Finding("evaluations")
    for name, artifact in run.evaluations.items():
        rows = [v for v in run.verdicts(artifact) if v.judge == artifact.manifest["config"]["judge"]]
        values: dict[int, list[float]] = {}
        for row in rows:
            if row.failure is not None:
                values.setdefault(row.place, []).append(0.0)
            elif row.score is not None:
                values.setdefault(row.place, []).append(row.score)
        mean = sum(sum(v) / len(v) for v in values.values()) / len(values) if values else math.nan
        score = artifact.metrics["score"]
        right = abs(mean - score) < 1e-6
        finding.check(right, f"{name}: score {score:.6g}, its verdicts give {mean:.6g}")
        sampled = len(read_table(artifact, "rollouts/", CompletionRow))
        complete = sampled == len(rows)
        finding.check(complete, f"{name}: {len(rows)} verdicts for {sampled} completions")
    return finding


LAWS = [
    Law("problems", "every policy answers the same problems", same_problems),
    Law("evaluations", "scores are the means of their verdicts", scores_are_means),
]

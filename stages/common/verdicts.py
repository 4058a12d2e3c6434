"""Verdict tables of evaluations, and comparisons of two policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhf.stages.common.tables import read_table
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning.rows import VerdictRow

if TYPE_CHECKING:
    from rlhf.tuning.evaluation.verdicts import Difference, Judged


def verdicts_of(evaluation: Artifact, judge: str = "score") -> Judged:
    """Read the verdicts of a judge; `score`: of the one that decides."""
    from rlhf.tuning.evaluation.verdicts import judged

    config = evaluation.manifest["config"]
    name = config["judge"] if judge == "score" else judge
    rows = read_table(evaluation, "verdicts/", VerdictRow)
    return judged((row for row in rows if row.judge == name), config["samples"])


def differences(evaluations: Mapping[str, Artifact]) -> dict[str, dict[str, Difference]]:
    """For each policy but the first its paired difference to the one before it, and to the first, by their names.

    evaluations: by the policies' names, in the order of their training.
    """
    from rlhf.tuning.evaluation.verdicts import difference

    verdicts = {name: verdicts_of(evaluation) for name, evaluation in evaluations.items()}
    names = list(verdicts)
    return {
        name: {other: difference(verdicts[other], verdicts[name]) for other in dict.fromkeys((before, names[0]))}
        for before, name in zip(names, names[1:], strict=False)
    }

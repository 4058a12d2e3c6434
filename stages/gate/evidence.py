"""Metrics of a policy and of the one that it is compared with, if a judge has no score of some completions.

A policy does not gain by a missing score. Its failed judgements, and those that do not apply although the other policy
has a score of the problem, count as the lowest score that the judge gave to either (0 at most) for bounds from below,
and as the highest (1 at least) for bounds from above. Failed judgements of the other policy are left out: they would
lower the bars. Problems of which the other has no score are left out of both for bounds that compare the two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Set
from typing import Any

from rlhf.stages.common.evaluation_metrics import READ, figures, is_of_verdicts
from rlhf.stages.common.tables import read_table
from rlhf.stages.gate.decide import Bounded
from rlhf.stages.sampling.episode_tables import episodes_of, summary, turns_summary
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning.rows import CompletionRow, VerdictRow


class Evaluation:
    """The tables of an evaluation without some places."""

    def __init__(self, artifact: Artifact, excluded: Set[int]):
        self._artifact, self._excluded = artifact, excluded
        every = read_table(artifact, "verdicts/", VerdictRow)
        self.verdicts = [row for row in every if row.place not in excluded]
        self.left_out = len({row.place for row in every} & excluded)

    @functools.cached_property
    def _rows(self) -> list[CompletionRow]:
        every = read_table(self._artifact, "rollouts/", CompletionRow, READ)
        return [row for row in every if row.place not in self._excluded]

    def figures(self, changed: Mapping[int, VerdictRow]) -> Mapping[str, Any]:
        """Compute the metrics with some verdicts replaced, by number; without a change they are those of the artifact.

        The numbers of judgements that failed, or do not apply, stay.
        """
        if not changed and not self.left_out:
            return self._artifact.metrics
        if not self.verdicts:
            return {}
        config = self._artifact.manifest["config"]
        judges = [config["judge"], *config.get("judges", {})]
        verdicts = [changed.get(number, row) for number, row in enumerate(self.verdicts)]
        found = figures(judges, config["samples"], self._rows, verdicts)
        for judge in judges:
            (found if judge == judges[0] else found["judges"][judge]).update(self._counts(judge))
        if episodes := [e for e in episodes_of(self._artifact).values() if e.place not in self._excluded]:
            tools = bool((config.get("environment") or {}).get("tools"))
            found |= summary(episodes) | turns_summary(self._artifact.local("turns/"), tools, episodes)
        # Metrics of all problems alone, such as levels, stay as they are.
        rest = {} if self.left_out else self._artifact.metrics
        return {name: value for name, value in rest.items() if not is_of_verdicts(name)} | found

    def _counts(self, judge: str) -> dict[str, int]:
        rows = [row for row in self.verdicts if row.judge == judge]
        applies = {row.place for row in rows if row.score is not None or row.failure is not None}
        failures = sum(row.failure is not None for row in rows)
        return {"judge_failures": failures, "not_applicable": len({row.place for row in rows} - applies)}


def bounded_metrics(candidate: Evaluation, other: Evaluation | None) -> tuple[Bounded, Mapping[str, Any] | None]:
    """Compute the metrics of the policy for each kind of bound, and those of the other policy."""
    theirs = [] if other is None else other.verdicts
    known = {(row.judge, row.place) for row in theirs if row.score is not None}
    scores: dict[str, list[float]] = {row.judge: [0.0, 1.0] for row in [*candidate.verdicts, *theirs]}
    for row in [*candidate.verdicts, *theirs]:
        scores[row.judge] += [] if row.score is None else [row.score]
    lost: list[tuple[int, VerdictRow]] = []
    alone: dict[int, VerdictRow] = {}
    for number, row in enumerate(candidate.verdicts):
        if row.score is None and (row.failure is not None or (row.judge, row.place) in known):
            lost.append((number, row))
        if other is not None and (row.judge, row.place) not in known:
            # It applies to neither of the two.
            alone[number] = dataclasses.replace(row, score=None, failure=None)

    def with_lost(end: Callable[[list[float]], float], left_out: Mapping[int, VerdictRow]) -> Mapping[str, Any]:
        worst = {number: dataclasses.replace(row, score=end(scores[row.judge])) for number, row in lost}
        return candidate.figures({**worst, **left_out})

    high_of_both = with_lost(max, alone)
    bounded = {
        "floor": with_lost(min, {}),
        "most": with_lost(max, {}),
        "fall": with_lost(min, alone),
        "rise": high_of_both,
        "times": high_of_both,
    }
    if other is None:
        return bounded, None
    failed = {n: dataclasses.replace(row, failure=None) for n, row in enumerate(theirs) if row.failure is not None}
    return bounded, other.figures(failed)

"""What the evaluations of a policy and of the one that it is compared with say, where a judge has no score.

The policy gains nothing by what has none: its failed judgements, and those that do not apply to it though the other has
a score of the problem, count as the lowest score that the judge has given to either (0 at most) where much is better,
and as the highest (1 at least) where little is. What the judge failed on for the other is left out: it would lower the
bars. Problems of which the other has no score at all are left out of both where the two are compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Set
from typing import Any

from rlhf.stages.common.evaluation_metrics import READ, figures, is_of_verdicts
from rlhf.stages.common.tables import read_table
from rlhf.stages.gate.decide import Told
from rlhf.stages.sampling.episode_tables import episodes_of, summary, turns_summary
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning.rows import CompletionRow, VerdictRow

Problem = tuple[str, int]
"""A judge and a place."""


class Evaluation:
    """The tables of an evaluation without some places, read when they are needed."""

    def __init__(self, artifact: Artifact, excluded: Set[int]):
        self._artifact, self._excluded = artifact, excluded
        every = read_table(artifact, "verdicts/", VerdictRow)
        self.verdicts = [row for row in every if row.place not in excluded]
        self.left_out = len({row.place for row in every} & excluded)
        self._rows: list[CompletionRow] | None = None

    @property
    def scored(self) -> set[Problem]:
        """The problems of which each judge has a score."""
        return {(row.judge, row.place) for row in self.verdicts if row.score is not None}

    def figures(self, changed: Mapping[int, VerdictRow]) -> Mapping[str, Any]:
        """The metrics with some verdicts in place of others, by number; those of all completions where none differs.

        How many judgements failed, or do not apply, is as it was.
        """
        if not changed and not self.left_out:
            return self._artifact.metrics
        if not self.verdicts:
            return {}
        config = self._artifact.manifest["config"]
        judges = [config["judge"], *config.get("judges", {})]
        if self._rows is None:
            every = read_table(self._artifact, "rollouts/", CompletionRow, READ)
            self._rows = [row for row in every if row.place not in self._excluded]
        verdicts = [changed.get(number, row) for number, row in enumerate(self.verdicts)]
        found = figures(judges, config["samples"], self._rows, verdicts)
        for name, judge in zip((None, *judges[1:]), judges, strict=True):
            (found if name is None else found["judges"][name]).update(self._counts(judge))
        if episodes := [e for e in episodes_of(self._artifact).values() if e.place not in self._excluded]:
            tools = bool((config.get("environment") or {}).get("tools"))
            found |= summary(episodes) | turns_summary(self._artifact.local("turns/"), tools, episodes)
        # Of all problems what is of them alone stays, such as levels.
        rest = {} if self.left_out else self._artifact.metrics
        return {name: value for name, value in rest.items() if not is_of_verdicts(name)} | found

    def _counts(self, judge: str) -> dict[str, int]:
        rows = [row for row in self.verdicts if row.judge == judge]
        applies = {row.place for row in rows if row.score is not None or row.failure is not None}
        failures = sum(row.failure is not None for row in rows)
        return {"judge_failures": failures, "not_applicable": len({row.place for row in rows} - applies)}


def told(candidate: Evaluation, other: Evaluation | None) -> tuple[Told, Mapping[str, Any] | None]:
    """The metrics of the policy, both ways, and of the other."""
    known = set() if other is None else other.scored
    ends = _ends([*candidate.verdicts, *(other.verdicts if other is not None else ())])
    lost = {
        number: row
        for number, row in enumerate(candidate.verdicts)
        if row.score is None and (row.failure is not None or (row.judge, row.place) in known)
    }

    # They apply to neither.
    alone = {
        number: dataclasses.replace(row, score=None, failure=None)
        for number, row in enumerate(candidate.verdicts)
        if other is not None and (row.judge, row.place) not in known
    }

    def counted(end: int, without: Mapping[int, VerdictRow]) -> Mapping[str, Any]:
        worst = {n: dataclasses.replace(row, score=ends[row.judge][end]) for n, row in lost.items()}
        return candidate.figures({**worst, **without})

    low = counted(0, {})
    high = counted(1, {}) if lost else low
    of_both = (counted(0, alone), counted(1, alone)) if alone else (low, high)
    if other is None:
        return Told(low, high, *of_both), None
    failed = {
        number: dataclasses.replace(row, failure=None)
        for number, row in enumerate(other.verdicts)
        if row.failure is not None
    }
    return Told(low, high, *of_both), other.figures(failed)


def _ends(verdicts: Iterable[VerdictRow]) -> dict[str, tuple[float, float]]:
    """The lowest score of each judge, 0 at most, and the highest, 1 at least."""
    ends: dict[str, tuple[float, float]] = {}
    for row in verdicts:
        low, high = ends.get(row.judge, (0.0, 1.0))
        if row.score is not None:
            low, high = min(low, row.score), max(high, row.score)
        ends[row.judge] = low, high
    return ends

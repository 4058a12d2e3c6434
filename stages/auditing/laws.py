"""What holds in every run, checked from what it left: `rlhf audit`.

A law reads artifacts and computes with NumPy and the standard library alone. It shares no arithmetic with the stages: a
fault of theirs must not hide itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stages.auditing.run import AuditedRun
from stages.store.artifacts import Store
from tuning.rows import OtherColumns

SHOWN = 3
"""Broken cases that a line shows."""


@dataclasses.dataclass
class Finding:
    """What a law found: how many cases it looked at, and those that break it."""

    unit: str
    """What a case is, in the plural."""
    checked: int = 0
    broken: list[str] = dataclasses.field(default_factory=list)
    """Each names its node and place, what is there and what should be."""
    left_out: list[str] = dataclasses.field(default_factory=list)
    """What could not be checked, and why."""

    def check(self, holds: bool, case: str) -> None:
        """Counts a case; `case` describes it where it breaks the law."""
        self.checked += 1
        if not holds:
            self.broken.append(case)


@dataclasses.dataclass(frozen=True)
class Law:
    """One thing that holds in every run."""

    name: str
    says: str
    """The law in one sentence."""
    look: Callable[[AuditedRun], Finding]
    deep: bool = False
    """Takes minutes: it reads every byte or computes with a model."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A law and what was found."""

    law: Law
    finding: Finding

    @property
    def state(self) -> str:
        """`holds`, `BROKEN`, or `no case` where there was nothing to look at."""
        if self.finding.broken:
            return "BROKEN"
        return "holds" if self.finding.checked else "no case"

    def as_json(self) -> dict[str, Any]:
        """For the report and for other programs."""
        found = dataclasses.asdict(self.finding)
        return {"law": self.law.name, "says": self.law.says, "state": self.state} | found


def all_laws() -> list[Law]:
    """Every law, in the order in which data flows."""
    from stages.auditing import evaluations, lineage, prompts, replay, scores, updates

    return [law for module in (lineage, prompts, scores, updates, evaluations, replay) for law in module.LAWS]


def audit(store: Store, record: Mapping[str, Any], *, deep: bool = False) -> Iterable[Verdict]:
    """Looks at a run law by law, so that a caller can show each as it comes."""
    run = AuditedRun(store, record)
    for law in all_laws():
        if deep or not law.deep:
            yield Verdict(law, _looked(law, run))


def _looked(law: Law, run: AuditedRun) -> Finding:
    """What the law finds. Tables of an older version are left out; what it cannot make sense of breaks it: one law must
    not end the audit."""
    try:
        return law.look(run)
    except OtherColumns as e:
        return Finding("cases", left_out=[f"a table is of another version: {e}"])
    except Exception as e:
        return Finding("cases", broken=[f"the artifacts cannot be read as this law needs: {type(e).__name__}: {e}"])

"""What holds in every run, checked from what it left: `rlhf audit`.

A law reads artifacts and computes with NumPy and the standard library alone. It shares no arithmetic with the stages: a
fault of theirs must not hide itself.

A law is a function of what it looks at and of its finding. Laws of tables look at one round, one evaluation, or one
table of episodes after the other. All of them look at a round before the next is read, so that each table is read once
and one round is in memory at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlhf.stages.auditing.episode_tables import played
from rlhf.stages.auditing.run import AuditedRun, Tables
from rlhf.stages.store.artifacts import Store
from rlhf.tuning.rows import OtherColumns

SHOWN = 3
"""Broken cases that a line shows."""


@dataclasses.dataclass(frozen=True)
class Law:
    """One thing that holds in every run."""

    name: str
    says: str
    """The law in one sentence."""
    unit: str
    """What a case of it is, in the plural."""
    look: Callable[[Any, Finding], None]
    """Looks at what `over` names."""
    over: str = "run"
    """`run`, or the tables that it looks at one after the other: `rounds`, `evaluations` or `episodes`."""
    deep: bool = False
    """Takes minutes: it reads every byte or computes with a model."""


@dataclasses.dataclass
class Finding:
    """What a law found: how many cases it looked at, and those that break it."""

    law: Law
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

    @property
    def state(self) -> str:
        """`holds`, `BROKEN`, or `no case` where there was nothing to look at."""
        if self.broken:
            return "BROKEN"
        return "holds" if self.checked else "no case"

    def as_json(self) -> dict[str, Any]:
        """For the report and for other programs."""
        law = {"law": self.law.name, "says": self.law.says, "state": self.state, "unit": self.law.unit}
        return law | {"checked": self.checked, "broken": self.broken, "left_out": self.left_out}


def close(value: float | None, expected: float | None, relative: float, least: float) -> bool:
    """Whether two numbers differ by no more than a share of their size, or `least`; None is None alone."""
    if value is None or expected is None:
        return value is expected
    return math.isclose(value, expected, rel_tol=relative, abs_tol=least)


OVER: dict[str, Callable[[AuditedRun], Iterable[AuditedRun | Tables]]] = {
    "run": lambda run: [run],
    "rounds": lambda run: run.rounds,
    "evaluations": lambda run: run.evaluated,
    "episodes": played,
}


def all_laws() -> list[Law]:
    """Every law, in the order in which data flows."""
    from rlhf.stages.auditing import (
        evaluations,
        lineage,
        prompts,
        replay,
        rounds,
        scores,
        selection,
        trajectories,
        updates,
    )

    modules = (lineage, prompts, rounds, trajectories, scores, updates, selection, evaluations, replay)
    return [law for module in modules for law in module.LAWS]


def audit(store: Store, record: Mapping[str, Any], *, deep: bool = False) -> Iterator[Finding]:
    """Looks at a run law by law, so that a caller can show each as it comes."""
    run = AuditedRun(store, record)
    laws = [law for law in all_laws() if deep or not law.deep]
    found: dict[str, Finding] = {}
    for law in laws:
        if law.name not in found:
            # Laws of the same tables look at them together.
            found |= look([law] if law.over == "run" else [other for other in laws if other.over == law.over], run)
        yield found[law.name]


def look(laws: Sequence[Law], run: AuditedRun) -> dict[str, Finding]:
    """The findings, by name, of laws that look at the same. A table of an older version is left out; what a law cannot
    make sense of breaks it: one law must not end the audit."""
    found = {law.name: Finding(law) for law in laws}
    waiting = list(laws)
    for part in OVER[laws[0].over](run):
        for law in list(waiting):
            try:
                law.look(part, found[law.name])
            except Exception as e:
                waiting.remove(law)
                if isinstance(e, OtherColumns):
                    found[law.name].left_out.append(f"a table is of another version: {e}")
                else:
                    case = f"the artifacts cannot be read as this law needs: {type(e).__name__}: {e}"
                    found[law.name].broken.append(case)
        if isinstance(part, Tables):
            part.forget()
    return found

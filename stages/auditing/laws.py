"""A law: an invariant of every run. `rlhf.stages.auditing.audit` lists and checks all of them.

A law computes with NumPy and the standard library alone. It shares no arithmetic with the stages: it must not repeat
their errors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Law:
    """One invariant."""

    name: str
    says: str
    """The law in one sentence."""
    unit: str
    """Its cases, in the plural."""
    check: Callable[[Any, Finding], None]
    """Checks one object of `over`."""
    over: str = "run"
    """The objects that it checks one after the other: `run`, `rounds`, `evaluations` or `episodes`."""


@dataclasses.dataclass
class Finding:
    """The result of checking a law."""

    law: Law
    checked: int = 0
    """Cases."""
    broken: list[str] = dataclasses.field(default_factory=list)
    """Cases that violate the law, each with its node, its place, the stored and the expected value."""
    left_out: list[str] = dataclasses.field(default_factory=list)
    """Parts that could not be checked, with the reason."""

    def check(self, holds: bool, case: str) -> None:
        """Count a case. `case` describes it if it violates the law."""
        self.checked += 1
        if not holds:
            self.broken.append(case)

    @property
    def state(self) -> str:
        """`holds`, `BROKEN`, or `no case` if there was nothing to check."""
        if self.broken:
            return "BROKEN"
        return "holds" if self.checked else "no case"

    def as_json(self) -> dict[str, Any]:
        """Return the result for the report and for other programs."""
        law = {"law": self.law.name, "says": self.law.says, "state": self.state, "unit": self.law.unit}
        return law | {"checked": self.checked, "broken": self.broken, "left_out": self.left_out}


def close(value: float | None, expected: float | None, relative: float, absolute: float) -> bool:
    """Whether two numbers are equal within a relative or an absolute tolerance; None equals only None."""
    if value is None or expected is None:
        return value is expected
    return math.isclose(value, expected, rel_tol=relative, abs_tol=absolute)

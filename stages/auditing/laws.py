"""What holds in every run, checked from what it left: `rlhf audit`.

A law reads artifacts and computes with NumPy and the standard library alone. It shares no arithmetic with the stages: a
fault of theirs must not hide itself.

Laws of tables are generators that are sent one round, one evaluation, or one table of episodes after the other. All of
them look at a round before the next is read, so that each table is read once and one round is in memory at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from stages.auditing.played import Played, played
from stages.auditing.run import AuditedRun, Evaluated, Round
from stages.store.artifacts import Store
from tuning.rows import OtherColumns

Table = Round | Evaluated | Played
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


OfRounds = Generator[None, Round | None, Finding]
"""A law that is sent each round, in order, and None behind the last; it returns what it found, also before the end."""
OfEvaluations = Generator[None, Evaluated | None, Finding]
"""A law that is sent each evaluation, and None behind the last."""

OfEpisodes = Generator[None, Played | None, Finding]
"""A law that is sent the episodes of each round, refill and evaluation, and None behind the last."""


@dataclasses.dataclass(frozen=True)
class Law:
    """One thing that holds in every run."""

    name: str
    says: str
    """The law in one sentence."""
    look: Callable[[AuditedRun], Finding | OfRounds | OfEvaluations | OfEpisodes]
    over: Literal["run", "rounds", "evaluations", "episodes"] = "run"
    """What it is sent: nothing, for a law that looks at the whole run by itself, or tables, and is a generator then."""
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
    from stages.auditing import (
        choices,
        evaluations,
        lineage,
        prompts,
        replay,
        rounds,
        scores,
        trajectories,
        updates,
    )

    modules = (lineage, prompts, rounds, trajectories, scores, updates, choices, evaluations, replay)
    return [law for module in modules for law in module.LAWS]


def audit(store: Store, record: Mapping[str, Any], *, deep: bool = False) -> Iterable[Verdict]:
    """Looks at a run law by law, so that a caller can show each as it comes."""
    run = AuditedRun(store, record)
    laws = [law for law in all_laws() if deep or not law.deep]
    found: dict[str, Finding] = {}
    for law in laws:
        if law.name not in found:
            # Laws that are sent the same tables look at them together.
            together = [law] if law.over == "run" else [other for other in laws if other.over == law.over]
            found |= look(together, run)
        yield Verdict(law, found[law.name])


def look(laws: Sequence[Law], run: AuditedRun) -> dict[str, Finding]:
    """What laws that are sent the same find, by name. Tables of an older version are left out; what a law cannot make
    sense of breaks it: one law must not end the audit."""
    found: dict[str, Finding] = {}
    open_: dict[str, Generator[None, Any, Finding]] = {}
    for law in laws:
        with _told(law.name, found):
            first = law.look(run)
            if isinstance(first, Finding):
                found[law.name] = first
            else:
                next(first)
                open_[law.name] = first
    for table in _tables(laws[0], run):
        _send(open_, table, found)
        # A law waits with its last round in hand.
        table.forget()
    _send(open_, None, found)
    return found


def _tables(law: Law, run: AuditedRun) -> Iterable[Table]:
    """What a law is sent."""
    match law.over:
        case "rounds":
            return run.rounds
        case "evaluations":
            return run.evaluated
        case "episodes":
            return played(run)
        case _:
            return ()


def _send(laws: Mapping[str, Generator[None, Any, Finding]], table: Table | None, found: dict[str, Finding]) -> None:
    """Sends a table to each law that has not ended yet."""
    for name, law in laws.items():
        if name not in found:
            with _told(name, found):
                law.send(table)


@contextlib.contextmanager
def _told(name: str, found: dict[str, Finding]) -> Iterator[None]:
    """Puts what a law returns, or its end by an error, among the findings."""
    try:
        yield
    except StopIteration as e:
        found[name] = e.value
    except OtherColumns as e:
        found[name] = Finding("cases", left_out=[f"a table is of another version: {e}"])
    except Exception as e:
        case = f"the artifacts cannot be read as this law needs: {type(e).__name__}: {e}"
        found[name] = Finding("cases", broken=[case])

"""Check every law on the artifacts of a run: `rlhf audit`, and the gate."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlhf.stages.auditing import evaluations, lineage, prompts, rounds, scores, selection, trajectories, updates
from rlhf.stages.auditing.laws import Finding, Law
from rlhf.stages.auditing.run import AuditedRun, Completions, Round
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.tuning.rows import OtherColumns

MODULES = (lineage, prompts, rounds, trajectories, scores, updates, selection, evaluations)
LAWS: list[Law] = [law for module in MODULES for law in module.LAWS]
"""Every law, in the order in which data flows."""
FORM = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, ArtifactError, FileNotFoundError)
"""Errors of artifacts that do not have the form that a law expects."""
OVER: dict[str, Callable[[AuditedRun], Iterable[AuditedRun | Round | Completions]]] = {
    "run": lambda run: [run],
    "rounds": lambda run: run.rounds,
    "evaluations": lambda run: run.evaluated,
    "episodes": lambda run: run.played,
}


def audit(store: Store, record: Mapping[str, Any], laws: Sequence[Law] = LAWS) -> list[Finding]:
    """Check a run; return one finding for each law.

    All laws over rounds check a round before the next one is read: each table is read once, and one round is in memory
    at a time. A table of another version is left out. An error of form violates its law alone. Others, as of a disk or
    a network, say nothing about the run, and are raised.
    """
    run = AuditedRun(store, record)
    findings = [Finding(law) for law in laws]
    for over, parts_of in OVER.items():
        active = [finding for finding in findings if finding.law.over == over]
        for part in parts_of(run) if active else ():
            for finding in list(active):
                try:
                    finding.law.check(part, finding)
                except OtherColumns as e:
                    active.remove(finding)
                    finding.left_out.append(f"a table is of another version: {e}")
                except Exception as e:
                    if not _is_of_form(e, store):
                        raise
                    active.remove(finding)
                    finding.broken.append(f"the artifacts do not have the expected form: {type(e).__name__}: {e}")
    return findings


def _is_of_form(error: Exception, store: Store) -> bool:
    """Whether an error is of artifacts, and not of the disk, the network or the service that has them."""
    client = type(store.fs).__module__.partition(".")[0]
    places = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    # Clients of object stores have ValueError and an OSError without a number for refused requests and outages.
    refused = not store.is_local and any(place.partition(".")[0] == client for place in places)
    if refused and not isinstance(error, FileNotFoundError):
        return False
    # Those that pyarrow raises for a damaged file have no number.
    return isinstance(error, FORM) or (type(error) is OSError and error.errno is None)

"""Which runs of a store are kept, and what each of them holds: the roots of a garbage collection."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections import defaultdict
from typing import Any

from rlhf.flows.recipe.retention import Retention
from rlhf.flows.records import WHOLE, all_runs, sign_of, status_of
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.pins import pins
from rlhf.stages.store.reachability import Roots, Run
from rlhf.stages.store.registry import referenced


def roots_of(store: Store, retention: Retention, recipe: str | None = None) -> Roots:
    """What holds the artifacts of a store at this moment.

    recipe: the name of the recipe whose runs may go; None: of any.
    Raises ArtifactError for a record that cannot be read: nothing is collected past it.
    """
    # The pins and the registry first: a name that is given meanwhile is that of a run or artifact of before.
    pinned = pins(store)
    named = {text for run, _, _, digest in referenced(store) for text in (run, digest)}
    records = all_runs(store)
    status = {record["name"]: status_of(record, store) for record in records}
    why: dict[str, str] = {}
    for name, rank in _ranks(records, status).items():
        if rank < retention.keep:
            why[name] = f"one of the newest {retention.keep}"
    for record in records:
        name = record["name"]
        if recipe not in (None, record["recipe"]["name"]):
            why[name] = "of another recipe"
        if retention.keep_days is not None and _age(record) < datetime.timedelta(days=retention.keep_days):
            why[name] = f"of the last {retention.keep_days:g} days"
        if name in pinned:
            why[name] = f"pinned{': ' if pinned[name].get('note') else ''}{pinned[name].get('note', '')}"
        if name in named:
            why[name] = "named by the registry"
        if status[name] == "running":
            why[name] = "running"
    runs = tuple(
        dataclasses.replace(
            _run(record, why.get(record["name"], ""), status[record["name"]] == "running"),
            sign=sign_of(record, store) if status[record["name"]] == "killed" else "",
        )
        for record in records
    )
    # With the sources of those that stay.
    return Roots(runs, frozenset(named)).since(math.inf)


def _ranks(records: list[dict[str, Any]], status: dict[str, str]) -> dict[str, int]:
    """How many newer runs of its recipe each run has, among those that ended alike: finished, refused, with
    nothing new, or not at all."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    ranks = {}
    for record in reversed(records):
        ended = status[record["name"]]
        kind = record["recipe"]["name"], ended if ended in WHOLE else ""
        ranks[record["name"]] = counts[kind]
        counts[kind] += 1
    return ranks


def _sources(record: dict[str, Any]) -> dict[str, str]:
    """The runs whose rollouts a run takes, and that it is a fork of: its plan reads their records."""
    recipe, name = record["recipe"], record["name"]
    sources: dict[str | None, str] = {
        (recipe.get("rl") or {}).get("rollouts_from"): f"its rollouts are those of {name}",
        (recipe.get("fork") or {}).get("run"): f"{name} is a fork of it",
    }
    return {source: reason for source, reason in sources.items() if source is not None}


def _age(record: dict[str, Any]) -> datetime.timedelta:
    return datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(record["started"])


def _run(record: dict[str, Any], why: str, running: bool) -> Run:
    entries = record["nodes"].values()
    begun = {(e["stage"], e["key"]) for e in entries if "digest" not in e}
    return Run(
        name=record["name"],
        why=why,
        active=running,
        refs=tuple((e["stage"], e["key"], e.get("digest", "")) for e in entries),
        pending=frozenset(begun),
        ended=datetime.datetime.fromisoformat(
            record.get("ended") or record.get("saved") or record["started"]
        ).timestamp(),
        sources=_sources(record),
    )

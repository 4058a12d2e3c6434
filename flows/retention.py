"""The roots of a garbage collection: the runs of a store that are kept, and the artifacts of each."""

from __future__ import annotations

import datetime
import math
from collections import defaultdict
from typing import Any

from rlhf.flows.recipe.retention import Retention
from rlhf.flows.records import WHOLE, all_runs, sign_of, status_of, sweeps
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.pins import pins
from rlhf.stages.store.reachability import Roots, Run
from rlhf.stages.store.registry import referenced


def roots_of(store: Store, retention: Retention, recipe: str | None = None) -> Roots:
    """Return everything that keeps artifacts of a store at this moment.

    recipe: the recipe whose runs may go; None: any. Raises ArtifactError for an unreadable record, because its
    artifacts are unknown.
    """
    # The pins and the registry first: a name that is given meanwhile belongs to an older run or artifact.
    pinned = pins(store)
    named = {text for run, _, _, digest in referenced(store) for text in (run, digest)}
    # The newest sweep of each recipe.
    swept = {run for sweep in {sweep["recipe"]: sweep for sweep in sweeps(store)}.values() for run in sweep["runs"]}
    newer: dict[tuple[str, str], int] = defaultdict(int)
    found = []
    for record in reversed(all_runs(store)):
        name, of, status = record["name"], record["recipe"]["name"], status_of(record, store)
        # Counted separately among finished, refused and unfinished runs, and those without new data.
        kind = of, status if status in WHOLE else ""
        newer[kind] += 1
        note = pinned.get(name, {}).get("note")
        age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(record["started"])
        days = retention.keep_days
        reasons = {
            "running": status == "running",
            "named by the registry": name in named,
            f"pinned: {note}" if note else "pinned": name in pinned,
            "of the newest sweep of its recipe": name in swept,
            f"of the last {days or 0:g} days": days is not None and age < datetime.timedelta(days=days),
            "of another recipe": recipe not in (None, of),
            f"one of the newest {retention.keep}": newer[kind] <= retention.keep,
        }
        why = next((reason for reason, holds in reasons.items() if holds), "")
        found.append(_run(record, why, status == "running", sign_of(record, store) if status == "killed" else ""))
    # With the runs that those which stay refer to.
    return Roots(tuple(found[::-1]), frozenset(named)).since(math.inf)


def _run(record: dict[str, Any], why: str, running: bool, sign: str) -> Run:
    entries, recipe, name = record["nodes"].values(), record["recipe"], record["name"]
    # The plan of a run reads the records of the runs whose rollouts it reuses, and from which it forks.
    sources = {
        (recipe.get("rl") or {}).get("rollouts_from"): f"its rollouts are those of {name}",
        (recipe.get("fork") or {}).get("run"): f"{name} is a fork of it",
    }
    ended = record.get("ended") or record.get("saved") or record["started"]
    return Run(
        name=name,
        why=why,
        active=running,
        refs=tuple((e["stage"], e["key"], e.get("digest", "")) for e in entries),
        pending=frozenset((e["stage"], e["key"]) for e in entries if "digest" not in e),
        ended=datetime.datetime.fromisoformat(ended).timestamp(),
        sources={source: reason for source, reason in sources.items() if source is not None},
        sign=sign,
    )

"""Records of runs in a store."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.leases import beats, booted, holder_of, is_gone, rebooted
from rlhf.stages.store.manifests import is_inside
from rlhf.tuning.names import closest

SILENT_MINUTES = 10
"""After so long without a sign of life a run of a process that this host cannot see (another host or container) counts
as killed. Signs are the saves of its record and, while it makes an artifact, the beats of that lease."""


NEEDED = {"name": str, "status": str, "started": str, "recipe": dict, "nodes": dict}
"""What each record has, with its type."""
PARTIAL = "partial"
"""The status of a run that was told to make a part of its recipe, and has: it is not the newest finished one."""


REFUSED, NOTHING_NEW = "refused", "nothing new"
DECIDED = {"promoted": "Promoted", REFUSED: "Refused", NOTHING_NEW: "Nothing new"}
"""Prefect's name of a run's last state, by the decision of its gate; without one it is `Completed`."""
LISTED = 8
"""Names of runs that an error lists at most."""
WHOLE = ("finished", REFUSED, NOTHING_NEW)
"""The statuses of a run that has come to its end: its policy is made, its gate has refused it, or there was nothing."""


class UnknownRun(KeyError):
    """No run of that name; the message has the nearest one."""

    def __str__(self) -> str:
        return str(self.args[0])


def log_of(store: Store, name: str) -> Path:
    """Where this machine has the log of a run's worker: in a store that is a folder, else in its scratch folder."""
    return Path(store.root if store.is_local else store.scratch, "runs", name, "worker.log")


def all_runs(store: Store) -> list[dict[str, Any]]:
    """Every run's record, oldest first. Raises ArtifactError for one that cannot be read."""
    return _sorted(store, lambda name: _record(store, name))


def readable_runs(store: Store) -> list[dict[str, Any]]:
    """As `all_runs`, without those that cannot be read, which are told: they do not hide the others."""

    def readable(name: str) -> dict[str, Any] | None:
        try:
            return _record(store, name)
        except ArtifactError as error:
            logging.getLogger("rlhf").warning("run %s is left out: %s", name, error)
            return None

    return _sorted(store, readable)


def _sorted(store: Store, read: Callable[[str], dict[str, Any] | None]) -> list[dict[str, Any]]:
    found = runs.in_parallel(store, read, runs.names(store))
    return sorted((record for record in found if record is not None), key=lambda r: r["started"])


def _record(store: Store, name: str) -> dict[str, Any] | None:
    record = runs.read(store, name)
    if record is None:
        return None
    fits = isinstance(record, dict) and NEEDED.items() <= {n: type(record.get(n)) for n in NEEDED}.items()
    if not fits or (record["status"] == "running" and not isinstance(record.get("process"), dict)):
        place = store.address(runs.FOLDER, name, runs.HEAD)
        raise ArtifactError(f"{place} is no record of a run; move it away")
    return record


def status_of(record: dict[str, Any], store: Store, boot: float | None = None) -> str:
    """One of `WHOLE`, `running`, `partial`, `interrupted` (by Ctrl-C), `failed`, or `killed`: ended without a word.

    boot: when this host has booted, in seconds since 1970; None: what the system says.
    """
    if record["status"] != "running":
        return record["status"]
    gone = is_gone(record["process"])
    return (
        "killed" if gone or (gone is None and _silent(record, store, booted() if boot is None else boot)) else "running"
    )


def summary_of(record: dict[str, Any], store: Store) -> dict[str, Any]:
    """A run in a few values, as `--json` has it."""
    states = [e.get("state") for e in record["nodes"].values()]
    scores = {
        name.removeprefix("evaluate."): entry["metrics"].get("score")
        for name, entry in record["nodes"].items()
        if name.startswith("evaluate.") and "metrics" in entry
    }
    return {
        "name": record["name"],
        "recipe": record["recipe"]["name"],
        "status": status_of(record, store),
        "started": record["started"],
        "ended": record.get("ended"),
        "host": record.get("host"),
        "made": states.count("made"),
        "cached": states.count("hit"),
        "failed": states.count("failed"),
        "scores": scores,
    }


def _silent(record: dict[str, Any], store: Store, boot: float) -> bool:
    """Whether a run whose process this host cannot see has ended, by its signs of life."""
    if any(e["state"] == "running" and beats(store, e["stage"], e["key"]) for e in record["nodes"].values()):
        return False
    # No process outlives its boot; what was saved since is of another host of this name. Else the run
    # may be between two stages, where it holds no lease.
    saved = datetime.datetime.fromisoformat(record.get("saved", record["started"]))
    silence = datetime.datetime.now(datetime.UTC) - saved
    ended = rebooted(record["process"]) and saved.timestamp() < boot
    return ended or silence > datetime.timedelta(minutes=SILENT_MINUTES)


def sign_of(record: dict[str, Any], store: Store) -> str:
    """The last sign of life of a run that seems killed, if this host cannot see its process and it was silent for less
    than a day, which no clock is wrong by: its save and the beats of what it makes; else empty."""
    saved = record.get("saved", record["started"])
    silence = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(saved)
    if is_gone(record["process"]) is not None or abs(silence) > datetime.timedelta(days=1):
        return ""
    made = [e for e in record["nodes"].values() if e["state"] == "running"]
    return str([saved, *((holder_of(store, e["stage"], e["key"]) or {}).get("beat") for e in made)])


def candidates(store: Store, name: str | None) -> list[dict[str, Any]]:
    """The records that a name stands for, newest first: the run of that name, else the runs of the recipe of that name,
    else the one run whose name alone begins so. All runs where `name` is None or `latest`.

    Raises UnknownRun where there is none, or several begin so.
    """
    if name is not None and name != "latest":
        record = runs.read(store, name) if is_inside(name) else None
        if record is not None:
            return [record]
    records = readable_runs(store)[::-1]
    if name is None or name == "latest":
        if not records:
            raise UnknownRun(f"no runs in {store.shown}; `rlhf run demo` makes one")
        return records
    of_recipe = [r for r in records if r["recipe"]["name"] == name]
    begun = [r for r in records if r["name"].startswith(name)]
    if len(begun) > 1 and not of_recipe:
        raise UnknownRun(f"several runs in {store.shown} begin with {name!r}: {_listed(begun)}")
    if not of_recipe and not begun:
        near = closest(name, [r["name"] for r in records])
        hint = f"did you mean {near}?" if near else f"there are {_listed(records)}" if records else "there are none"
        raise UnknownRun(f"no run or recipe {name!r} in {store.shown}; {hint}")
    return of_recipe or begun


def _listed(records: list[dict[str, Any]]) -> str:
    """The names of the newest runs. records: the newest first."""
    more = f" and {len(records) - LISTED} older (`rlhf runs`)" if len(records) > LISTED else ""
    return ", ".join(r["name"] for r in reversed(records[:LISTED])) + more


def find_run(store: Store, name: str | None) -> dict[str, Any]:
    """The newest of the records that a name stands for (`candidates`). Raises UnknownRun where there is none."""
    return candidates(store, name)[0]


def whole_first(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records, with those of runs of a part of their recipe behind the others."""
    return sorted(records, key=lambda record: record["status"] == PARTIAL)


def latest_with(runs: list[dict[str, Any]], recipe: str, node: str) -> dict[str, Any] | None:
    """The newest entry of a node in the runs of a recipe that made or read it, or else that tried to.

    runs: oldest first.
    """
    tried = None
    for record in reversed(runs):
        entry = record["nodes"].get(node) if record["recipe"]["name"] == recipe else None
        if entry and entry["state"] in ("hit", "made"):
            return entry
        # The newest of the entries that failed or were interrupted.
        tried = tried or entry
    return tried


def finished_nodes(record: dict[str, Any]) -> set[str]:
    """Names of a run's nodes that have an artifact."""
    return {name for name, entry in record["nodes"].items() if "digest" in entry}


def refusal_of(record: Mapping[str, Any]) -> str | None:
    """Why the gate of a run has refused its policy; None where it has not."""
    decision = record.get("decision") or {}
    return "; ".join(decision["reasons"]) if decision.get("decision") == REFUSED else None

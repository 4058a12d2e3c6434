"""Records of runs in a store."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf.stages.store import json_schemas, runs
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.leases import beats, booted, holder_of, is_gone, rebooted
from rlhf.stages.store.manifests import is_inside
from rlhf.tuning.names import closest

SILENT_MINUTES = 10
"""Time without a sign of life after which a run on another host or in another container counts as killed. Signs are the
saves of its record and, while it makes an artifact, the beats of that lease."""


NEEDED = {"name": str, "status": str, "started": str, "recipe": dict, "nodes": dict}
"""Fields of each record, with their types."""
PARTIAL = "partial"
"""The status of a run that has made a part of its recipe, as its command asked."""


REFUSED, NOTHING_NEW = "refused", "nothing new"
DECIDED = {"promoted": "Promoted", REFUSED: "Refused", NOTHING_NEW: "Nothing new"}
"""Prefect's name of a run's last state by the decision of its gate; `Completed` without a gate."""
SWEEPS, SWEEP = "sweeps", "sweep.json"
"""Folder of sweeps in a store, and the record of one."""
LISTED = 8
"""Maximum number of runs that an error lists."""
WHOLE = ("finished", REFUSED, NOTHING_NEW)
"""The statuses of a run that has reached its end: finished, refused by its gate, or without new data."""


class UnknownRun(KeyError):
    """A name without a run; the message has the nearest one."""

    def __str__(self) -> str:
        return str(self.args[0])


def log_of(store: Store, name: str) -> Path:
    """Return the log of a run's worker on this machine: in a local store, else in the scratch folder."""
    return Path(store.root if store.is_local else store.scratch, "runs", name, "worker.log")


def all_runs(store: Store) -> list[dict[str, Any]]:
    """Return every run's record, oldest first. Raises ArtifactError for an unreadable one."""
    found = runs.in_parallel(store, lambda name: _record(store, name), runs.names(store))
    return sorted(filter(None, found), key=lambda record: record["started"])


def readable_runs(store: Store, names: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Return the readable records of runs, by default of all, oldest first; warn about each other one."""

    def read(name: str) -> dict[str, Any] | None:
        try:
            return _record(store, name)
        except ArtifactError as error:
            logging.getLogger("rlhf").warning("run %s is left out: %s", name, error)
            return None

    found = runs.in_parallel(store, read, runs.names(store) if names is None else names)
    return sorted(filter(None, found), key=lambda record: record["started"])


def _record(store: Store, name: str) -> dict[str, Any] | None:
    record = runs.read(store, name)
    if record is None:
        return None
    fits = isinstance(record, dict) and NEEDED.items() <= {n: type(record.get(n)) for n in NEEDED}.items()
    if not fits or (record["status"] == "running" and not isinstance(record.get("process"), dict)):
        raise ArtifactError(f"{store.address(runs.FOLDER, name, runs.HEAD)} is not a record of a run; move it away")
    return record


def status_of(record: Mapping[str, Any], store: Store, boot: float | None = None) -> str:
    """Return one of `WHOLE`, `running`, `partial`, `interrupted` (by Ctrl-C), `failed` or `killed`.

    boot: the time of this host's boot in seconds since 1970; None: as the system reports it.
    """
    if record["status"] != "running":
        return record["status"]
    gone = is_gone(record["process"])
    if gone is None:
        gone = _is_silent(record, store, booted() if boot is None else boot)
    return "killed" if gone else "running"


def summary_of(record: dict[str, Any], store: Store) -> dict[str, Any]:
    """Return a run in a few values, for `--json`."""
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


def sweeps(store: Store) -> list[dict[str, Any]]:
    """Return the record of every sweep, oldest first. Raises ArtifactError for an unreadable one."""
    found = [store.read_record(json_schemas.SWEEP, SWEEPS, name, SWEEP) for name in store.names(SWEEPS)]
    return sorted(filter(None, found), key=lambda sweep: sweep["started"])


def _is_silent(record: Mapping[str, Any], store: Store, boot: float) -> bool:
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
    """Return the last sign of life of a run that seems killed: its save, and the beats of artifacts that it makes.

    Empty if this host sees its process, or if it was silent for more than a day, which no clock is wrong by.
    """
    saved = record.get("saved", record["started"])
    silence = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(saved)
    if is_gone(record["process"]) is not None or abs(silence) > datetime.timedelta(days=1):
        return ""
    made = [e for e in record["nodes"].values() if e["state"] == "running"]
    return str([saved, *((holder_of(store, e["stage"], e["key"]) or {}).get("beat") for e in made)])


def candidates(store: Store, name: str | None) -> list[dict[str, Any]]:
    """Return the records that a name may mean, newest first: the run of that name, else the runs of that recipe, else
    the only run whose name begins with it. All runs if `name` is None or `latest`.

    Raises UnknownRun if there is none, or several names begin with it.
    """
    if name == "latest":
        name = None
    if name is not None and is_inside(name) and (record := runs.read(store, name)) is not None:
        return [record]
    records = readable_runs(store)[::-1]
    if name is None:
        if not records:
            raise UnknownRun(f"no runs in {store.shown}; `rlhf run demo` makes one")
        return records
    of_recipe = [r for r in records if r["recipe"]["name"] == name]
    begun = [r for r in records if r["name"].startswith(name)]
    if of_recipe or len(begun) == 1:
        return of_recipe or begun
    if begun:
        raise UnknownRun(f"several runs in {store.shown} begin with {name!r}: {_listed(begun)}")
    near = closest(name, [r["name"] for r in records])
    hint = f"did you mean {near}?" if near else f"there are {_listed(records)}" if records else "there are none"
    raise UnknownRun(f"no run or recipe {name!r} in {store.shown}; {hint}")


def _listed(records: list[dict[str, Any]]) -> str:
    """Return the names of the newest runs. records: the newest first."""
    more = f" and {len(records) - LISTED} older (`rlhf runs`)" if len(records) > LISTED else ""
    return ", ".join(r["name"] for r in reversed(records[:LISTED])) + more


def find_run(store: Store, name: str | None) -> dict[str, Any]:
    """Return the newest of the records that a name may mean (`candidates`). Raises UnknownRun without one."""
    return candidates(store, name)[0]


def whole_first(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records, with runs of a part of their recipe after the others."""
    return sorted(records, key=lambda record: record["status"] == PARTIAL)


def latest_with(runs: list[dict[str, Any]], recipe: str, node: str) -> dict[str, Any] | None:
    """Return the newest entry of a node in a recipe's runs that made or read it, else in those that tried to.

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
    """Return the names of a run's nodes that have an artifact."""
    return {name for name, entry in record["nodes"].items() if "digest" in entry}


def refusal_of(record: Mapping[str, Any]) -> str | None:
    """Return why the gate of a run refused its policy; None if it did not."""
    decision = record.get("decision") or {}
    return "; ".join(decision["reasons"]) if decision.get("decision") == REFUSED else None

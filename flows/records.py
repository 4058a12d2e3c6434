"""Records of runs in a store."""

from __future__ import annotations

from typing import Any

from stages.store.artifacts import Store
from stages.store.leases import is_gone
from tuning.names import nearest


class UnknownRun(KeyError):
    """No run of that name; the message has the nearest one."""

    def __str__(self) -> str:
        return str(self.args[0])


def all_runs(store: Store) -> list[dict[str, Any]]:
    """Every run's record, oldest first."""
    records = []
    for path in store.fs.glob(store.join("runs", "*", "run.json")):
        record = store.read_json("runs", path.split("/")[-2], "run.json")
        if record is not None:
            records.append(record)
    return sorted(records, key=lambda r: r["started"])


def status_of(record: dict[str, Any]) -> str:
    """`running`, `finished` or `failed`; `killed` where the record says running but its process has ended."""
    # None, for a process of another host, counts as running.
    gone = record["status"] == "running" and is_gone(record["process"])
    return "killed" if gone else record["status"]


def find_run(store: Store, name: str | None) -> dict[str, Any]:
    """The record of a run, or of the newest where `name` is None or `latest`."""
    if name in (None, "latest"):
        runs = all_runs(store)
        if not runs:
            raise UnknownRun(f"no runs in {store.shown}; `rlhf run demo` makes one")
        return runs[-1]
    assert name is not None
    record = store.read_json("runs", name, "run.json")
    if record is None:
        names = [r["name"] for r in all_runs(store)]
        raise UnknownRun(f"no run {name!r} in {store.shown}; {nearest(name, names)}")
    return record


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

"""The state of a store as Prometheus metrics. Every scrape reads the records of its runs and its manifests."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rlhf.flows.records import WHOLE, readable_runs, status_of
from rlhf.flows.report.formats import seconds_at
from rlhf.flows.report.measures import number
from rlhf.stages.store import registry
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.leases import holder_of
from rlhf.stages.store.reachability import versions

STATES = ("running", "partial", "failed", "interrupted", "killed", *WHOLE)
"""States of runs; each has a sample in every recipe, so that an alert can count from 0."""
WAIT_SECONDS = 120.0
"""A scrape waits so long for the reading of another one, which a store that hangs may never end."""
METRICS = {
    "runs": ("Runs in the store.", ("recipe", "state")),
    "seconds_since_finished": (
        "Seconds since a run of a recipe came to its end, whatever its gate decided.", ("recipe",)),
    "score": ("Held-out scores of the last finished run.", ("recipe", "policy")),
    "stage_seconds": ("Seconds of the newest run by stage.", ("recipe", "stage")),
    "tokens_per_second": ("Tokens a second of the newest run, the last of each stage.", ("recipe", "stage")),
    "hit_ratio": ("Share of the newest run's finished stages that was cached.", ("recipe",)),
    "runs_waiting": ("Runs that wait for what another run makes.", ()),
    "store_bytes": ("Bytes of artifacts in the store.", ("stage",)),
    "name_entry": ("Number of the newest entry of a name.", ("name", "run")),
    "name_seconds": ("Seconds since the newest entry of a name.", ("name",)),
}  # fmt: skip
"""Texts and labels of the metrics, by their names without `rlhf_`."""
Record = Mapping[str, Any]
Values = dict[str, dict[tuple[str, ...], float]]
"""The samples of each metric by the values of its labels."""


class StoreCollector(Collector):
    """Reads a store when it is asked, and once at a time."""

    def __init__(self, store: Store):
        self._store = store
        self._reading = threading.Lock()

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: the registry would read the store to find out."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The metrics, from the store as it is now. Raises TimeoutError where the reading of another scrape hangs."""
        if not self._reading.acquire(timeout=WAIT_SECONDS):
            raise TimeoutError(f"the store {self._store.shown} has not been read for {WAIT_SECONDS:g} s")
        try:
            found = _values(self._store)
        finally:
            self._reading.release()
        for name, (text, labels) in METRICS.items():
            family = GaugeMetricFamily(f"rlhf_{name}", text, labels=labels)
            for of, value in found[name].items():
                family.add_metric(of, value)
            yield family


def registry_of(store: Store) -> CollectorRegistry:
    """What prometheus_client prints, writes or serves of a store."""
    found = CollectorRegistry()
    found.register(StoreCollector(store))
    return found


def _values(store: Store) -> Values:
    found: Values = defaultdict(dict)
    by_recipe: dict[str, list[tuple[Record, str]]] = defaultdict(list)
    found["runs_waiting"][()] = 0
    for record in readable_runs(store):
        status = status_of(record, store)
        by_recipe[record["recipe"]["name"]].append((record, status))
        if status == "running":
            found["runs_waiting"][()] += _waits(store, record)
    for recipe, runs in by_recipe.items():
        counts = Counter(status for _, status in runs)
        found["runs"] |= {(recipe, state): counts[state] for state in (*STATES, *counts)}
        _of_ended(found, recipe, [record for record, status in runs if status in WHOLE and record.get("ended")])
        _of_newest(found, recipe, runs[-1][0]["nodes"].values())
    sizes: Counter[tuple[str, ...]] = Counter()
    for version in versions(store):
        sizes[version.stage,] += version.size
    found["store_bytes"] |= sizes
    for name in registry.names(store):
        try:
            now = registry.current(store, name)
        except registry.RegistryError:
            # `rlhf champions` names the damaged file; the other metrics stay.
            continue
        if now is not None:
            found["name_entry"][name, now.policy.run] = now.number
            found["name_seconds"][name,] = max(0.0, time.time() - seconds_at(now.when))
    return found


def _waits(store: Store, record: Record) -> int:
    """The nodes of a run that another process makes."""
    nodes = [entry for entry in record["nodes"].values() if entry["state"] == "running"]
    holders = [holder_of(store, entry["stage"], entry["key"]) for entry in nodes]
    own = record["process"]["pid"], record["process"]["host"]
    return sum(holder is not None and (holder["pid"], holder["host"]) != own for holder in holders)


def _of_ended(found: Values, recipe: str, whole: list[Record]) -> None:
    """The age of the last run that came to its end, and the scores of the last that finished."""
    whole = sorted(whole, key=lambda record: seconds_at(record["ended"]))
    for record in whole[-1:]:
        found["seconds_since_finished"][recipe,] = max(0.0, time.time() - seconds_at(record["ended"]))
    for record in [record for record in whole if record["status"] == "finished"][-1:]:
        for name, entry in record["nodes"].items():
            value = number((entry.get("metrics") or {}).get("score"))
            if name.startswith("evaluate.") and value is not None:
                found["score"][recipe, name.removeprefix("evaluate.")] = value


def _of_newest(found: Values, recipe: str, entries: Collection[Mapping[str, Any]]) -> None:
    """Seconds and speed of the stages of the newest run, and the share that was cached."""
    for entry in entries:
        of = recipe, entry["stage"]
        found["stage_seconds"][of] = found["stage_seconds"].get(of, 0.0) + (entry.get("seconds") or 0.0)
        speed = number((entry.get("metrics") or {}).get("tokens_per_second"))
        if speed is not None:
            found["tokens_per_second"][of] = speed
    hits = [entry["state"] == "hit" for entry in entries if "digest" in entry]
    if hits:
        found["hit_ratio"][recipe,] = sum(hits) / len(hits)

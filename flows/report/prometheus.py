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
from rlhf.stages.store.reachability import versions

STATES = ("running", "partial", "failed", "interrupted", "killed", *WHOLE)
"""States of runs; every recipe has a sample of each, so that an alert can count from 0."""
WAIT_SECONDS = 120.0
"""Longest wait of a scrape for another one, which may never end if the store hangs."""
METRICS = {
    "runs": ("Runs in the store.", ("recipe", "state")),
    "seconds_since_finished": (
        "Seconds since a run of a recipe ended, whatever its gate decided.", ("recipe",)),
    "score": ("Held-out scores of the last finished run.", ("recipe", "policy")),
    "stage_seconds": ("Seconds of the newest run by stage.", ("recipe", "stage")),
    "tokens_per_second": ("Tokens a second of the newest run, the last of each stage.", ("recipe", "stage")),
    "hit_ratio": ("Share of the newest run's finished stages that was cached.", ("recipe",)),
    "store_bytes": ("Bytes of artifacts in the store.", ("stage",)),
    "name_entry": ("Number of the newest entry of a name.", ("name", "run")),
    "name_seconds": ("Seconds since the newest entry of a name.", ("name",)),
}  # fmt: skip
"""Texts and labels of the metrics, by name without `rlhf_`."""
Record = Mapping[str, Any]
Values = dict[str, dict[tuple[str, ...], float]]
"""Samples of each metric by the values of its labels."""


class StoreCollector(Collector):
    """Reads a store for one scrape at a time."""

    def __init__(self, store: Store):
        self._store = store
        self._reading = threading.Lock()

    def describe(self) -> list[GaugeMetricFamily]:
        """Return nothing: the registry would read the store otherwise."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics of the store. Raises TimeoutError if another scrape hangs."""
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
    """Return a registry of the store's metrics."""
    found = CollectorRegistry()
    found.register(StoreCollector(store))
    return found


def _values(store: Store) -> Values:
    found: Values = defaultdict(dict)
    by_recipe: dict[str, list[tuple[Record, str]]] = defaultdict(list)
    for record in readable_runs(store):
        by_recipe[record["recipe"]["name"]].append((record, status_of(record, store)))
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


def _of_ended(found: Values, recipe: str, whole: list[Record]) -> None:
    """Add the age of the last run that ended, and the scores of the last that finished."""
    whole = sorted(whole, key=lambda record: seconds_at(record["ended"]))
    for record in whole[-1:]:
        found["seconds_since_finished"][recipe,] = max(0.0, time.time() - seconds_at(record["ended"]))
    for record in [record for record in whole if record["status"] == "finished"][-1:]:
        for name, entry in record["nodes"].items():
            value = number((entry.get("metrics") or {}).get("score"))
            if name.startswith("evaluate.") and value is not None:
                found["score"][recipe, name.removeprefix("evaluate.")] = value


def _of_newest(found: Values, recipe: str, entries: Collection[Mapping[str, Any]]) -> None:
    """Add seconds and speed of the stages of the newest run, and the share that was cached."""
    for entry in entries:
        of = recipe, entry["stage"]
        found["stage_seconds"][of] = found["stage_seconds"].get(of, 0.0) + (entry.get("seconds") or 0.0)
        speed = number((entry.get("metrics") or {}).get("tokens_per_second"))
        if speed is not None:
            found["tokens_per_second"][of] = speed
    hits = [entry["state"] == "hit" for entry in entries if "digest" in entry]
    if hits:
        found["hit_ratio"][recipe,] = sum(hits) / len(hits)

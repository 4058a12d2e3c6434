"""The state of a store as Prometheus metrics. Every scrape reads the records of its runs and its manifests."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from flows.records import WHOLE, readable_runs, status_of
from flows.report.formats import seconds_at
from flows.report.measures import number
from flows.report.scrapes import ScrapeServer
from stages.store import registry
from stages.store.artifacts import Store
from stages.store.leases import held_by
from stages.store.reach import versions

STATES = ("running", "partial", "failed", "interrupted", "killed", *WHOLE)
"""States of runs; each has a sample in every recipe, so that an alert can count from 0."""
Record = Mapping[str, Any]


STALE_SECONDS = 120.0
"""So long the last reading of a store stands for it while the next one goes on."""


class StoreCollector(Collector):
    """Reads a store when it is asked, and once at a time: who asks meanwhile gets what was read last."""

    def __init__(self, store: Store):
        self._store = store
        self._reading = threading.Lock()
        self._last: list[GaugeMetricFamily] | None = None
        self._read_at = 0.0

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: the registry would read the store to find out."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The metrics, from the store as it is now, or as it was when it was read last.

        Raises TimeoutError where a store that hangs has been read last more than STALE_SECONDS ago: what was well then
        says nothing of now.
        """
        asked = time.monotonic()
        # Before the first reading has ended there is nothing else to answer with.
        if self._reading.acquire(timeout=STALE_SECONDS if self._last is None else 0):
            try:
                if self._last is None or self._read_at < asked:
                    began = time.monotonic()
                    self._last, self._read_at = list(self._families()), began
            finally:
                self._reading.release()
        elif self._last is None or asked - self._read_at > STALE_SECONDS:
            raise TimeoutError(f"the store {self._store.shown} has not been read for {STALE_SECONDS:g} s")
        yield from self._last

    def _families(self) -> Iterator[GaugeMetricFamily]:
        runs = readable_runs(self._store)
        status = {record["name"]: status_of(record, self._store) for record in runs}
        by_recipe: dict[str, list[Record]] = {}
        for record in runs:
            by_recipe.setdefault(record["recipe"]["name"], []).append(record)
        yield _by_state(by_recipe, status)
        yield from _of_finished(by_recipe, status)
        yield from _of_newest(by_recipe)
        yield self._waiting([record for record in runs if status[record["name"]] == "running"])
        yield self._bytes()
        yield from self._names()
        if self._store.is_local and os.path.isdir(self._store.root):
            free = GaugeMetricFamily("rlhf_store_free_bytes", "Free bytes of the disk that the store is on.")
            free.add_metric([], shutil.disk_usage(self._store.root).free)
            yield free

    def _names(self) -> Iterator[GaugeMetricFamily]:
        """Of each name, such as champion: its newest entry and its age."""
        entry = GaugeMetricFamily("rlhf_name_entry", "Number of the newest entry of a name.", labels=["name", "run"])
        age = GaugeMetricFamily("rlhf_name_seconds", "Seconds since the newest entry of a name.", labels=["name"])
        for name in registry.names(self._store):
            try:
                now = registry.current(self._store, name)
            except registry.RegistryError:
                # `rlhf champions` names the damaged file; the other metrics stay.
                continue
            if now is not None:
                entry.add_metric([name, now.policy.run], now.number)
                age.add_metric([name], max(0.0, time.time() - seconds_at(now.when)))
        yield entry
        yield age

    def _waiting(self, running: list[Record]) -> GaugeMetricFamily:
        """Runs that wait for what another process makes."""
        waiting = 0
        for record in running:
            for entry in record["nodes"].values():
                if entry["state"] != "running":
                    continue
                holder = held_by(self._store, entry["stage"], entry["key"])
                own = record["process"]
                waiting += holder is not None and (holder["pid"], holder["host"]) != (own["pid"], own["host"])
        family = GaugeMetricFamily("rlhf_runs_waiting", "Runs that wait for what another run makes.")
        family.add_metric([], waiting)
        return family

    def _bytes(self) -> GaugeMetricFamily:
        sizes: Counter[str] = Counter()
        for version in versions(self._store):
            sizes[version.stage] += version.size
        family = GaugeMetricFamily("rlhf_store_bytes", "Bytes of artifacts in the store.", labels=["stage"])
        for stage, size in sorted(sizes.items()):
            family.add_metric([stage], size)
        return family


def _by_state(by_recipe: Mapping[str, list[Record]], status: Mapping[str, str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily("rlhf_runs", "Runs in the store.", labels=["recipe", "state"])
    for recipe, records in by_recipe.items():
        counts = Counter(status[record["name"]] for record in records)
        for state in dict.fromkeys([*STATES, *counts]):
            family.add_metric([recipe, state], counts[state])
    return family


def _of_finished(by_recipe: Mapping[str, list[Record]], status: Mapping[str, str]) -> Iterator[GaugeMetricFamily]:
    """Of the newest finished run of each recipe: its age and its scores."""
    age = GaugeMetricFamily(
        "rlhf_seconds_since_finished",
        "Seconds since a run of a recipe came to its end, whatever its gate decided.",
        labels=["recipe"],
    )
    score = GaugeMetricFamily(
        "rlhf_score", "Held-out scores of the last finished run.", labels=["recipe", "policy"]
    )  # fmt: skip
    for recipe, records in by_recipe.items():
        whole = [record for record in records if status[record["name"]] in WHOLE and record.get("ended")]
        if whole:
            newest = max(seconds_at(record["ended"]) for record in whole)
            age.add_metric([recipe], max(0.0, time.time() - newest))
        done = [record for record in whole if record["status"] == "finished"]
        if not done:
            continue
        last = max(done, key=lambda record: seconds_at(record["ended"]))
        for name, entry in last["nodes"].items():
            value = number((entry.get("metrics") or {}).get("score")) if name.startswith("evaluate.") else None
            if value is not None:
                score.add_metric([recipe, name.removeprefix("evaluate.")], value)
    yield age
    yield score


def _of_newest(by_recipe: Mapping[str, list[Record]]) -> Iterator[GaugeMetricFamily]:
    """Of the newest run of each recipe: seconds and speed of its stages, and the share that was cached."""
    labels = ["recipe", "stage"]
    seconds = GaugeMetricFamily("rlhf_stage_seconds", "Seconds of the newest run by stage.", labels=labels)
    speed = GaugeMetricFamily(
        "rlhf_tokens_per_second", "Tokens a second of the newest run, the last of each stage.", labels=labels
    )
    share = GaugeMetricFamily(
        "rlhf_hit_ratio", "Share of the newest run's finished stages that was cached.", labels=["recipe"]
    )
    for recipe, records in by_recipe.items():
        entries = list(records[-1]["nodes"].values())
        spent: dict[str, float] = defaultdict(float)
        speeds: dict[str, float] = {}
        for entry in entries:
            spent[entry["stage"]] += entry.get("seconds") or 0.0
            value = number((entry.get("metrics") or {}).get("tokens_per_second"))
            if value is not None:
                speeds[entry["stage"]] = value
        for stage, total in spent.items():
            seconds.add_metric([recipe, stage], total)
        for stage, value in speeds.items():
            speed.add_metric([recipe, stage], value)
        ended = [entry for entry in entries if "digest" in entry]
        if ended:
            share.add_metric([recipe], sum(entry["state"] == "hit" for entry in ended) / len(ended))
    yield seconds
    yield speed
    yield share


def _registry(store: Store) -> CollectorRegistry:
    found = CollectorRegistry()
    found.register(StoreCollector(store))
    return found


def text_of(store: Store) -> str:
    """The metrics in Prometheus's text format."""
    return generate_latest(_registry(store)).decode()


def serve_metrics(store: Store, host: str, port: int) -> ScrapeServer:
    """Starts a server; port 0 takes any that is free. Raises OSError where it cannot listen."""
    return ScrapeServer(make_wsgi_app(_registry(store)), host, port)

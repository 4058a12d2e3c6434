"""Records of runs: `runs/<name>/run.json`, and parts with the entries of finished nodes.

A record grows by each node. The entries of finished nodes of a long run go into parts, each written once, which the
head names. So the bytes that a run writes are in proportion to its nodes, and a head with its parts is always whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from rlhf.stages.store import json_schemas
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.transfers import each

FOLDER, HEAD, PARTS = "runs", "run.json", "parts"
PART = 64
"""Entries of a part."""
READS = 5
"""Tries to read a record while its writer replaces parts."""
Record = dict[str, Any]
T = TypeVar("T")
R = TypeVar("R")


def head(store: Store, name: str) -> Any | None:
    """Return the record of a run without the entries in its parts, but with all running nodes; None without a run.

    Raise ArtifactError for a file that is not valid JSON, and for the record of another run.
    """
    found = store.read_json(FOLDER, name, HEAD)
    if isinstance(found, dict) and found.get("name") != name:
        raise ArtifactError(f"{store.address(FOLDER, name, HEAD)} is of run {found.get('name')!r}; move it away")
    return found


def read(store: Store, name: str) -> Any | None:
    """Return the whole record of a run; None if there is none. Raise ArtifactError for invalid or missing files."""
    missing: list[str] = []
    for _ in range(READS):
        found = head(store, name)
        if not isinstance(found, dict) or not found.get(PARTS):
            return found
        if fault := json_schemas.misfit(found, json_schemas.PARTED):
            raise ArtifactError(f"{store.address(FOLDER, name, HEAD)} has another form ({fault}); move it away")
        parts: dict[str, Any] = {part: store.read_json(FOLDER, name, part) for part in _expanded(found.pop(PARTS))}
        missing = [part for part, entries in parts.items() if not isinstance(entries, dict)]
        if not missing:
            nodes = {node: entry for entries in parts.values() for node, entry in entries.items()}
            return found | {"nodes": nodes | found["nodes"]}
    raise ArtifactError(f"{store.address(FOLDER, name, missing[0])} is missing: the record of run {name} is not whole")


def _part(tries: int, number: int) -> str:
    return f"nodes-{tries}-{number:05d}.json"


def _expanded(spans: Iterable[tuple[int, int, int]]) -> list[str]:
    """Return the names of the parts of a head, which has them as (try, first number, last number)."""
    return [_part(tries, number) for tries, first, last in spans for number in range(first, last + 1)]


def _spans(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return the reverse of `_expanded`, so that a head does not grow by each part."""
    spans: list[tuple[int, int, int]] = []
    for tries, number in parts:
        if spans and spans[-1][0] == tries and spans[-1][2] == number - 1:
            spans[-1] = (tries, spans[-1][1], number)
        else:
            spans.append((tries, number, number))
    return spans


def names(store: Store) -> list[str]:
    """Return the names of all runs, sorted."""
    return store.names(FOLDER)


def exists(store: Store, name: str) -> bool:
    """Whether a run has this name."""
    return store.exists(FOLDER, name, HEAD)


def in_parallel(store: Store, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
    """Return the results for each item in their order, by parallel requests to a remote store."""
    return map(function, items) if store.is_local else each(function, items)


class Recorder:
    """Writes the record of one run while it grows."""

    def __init__(self, store: Store, name: str):
        self._store, self._name = store, name
        self._parts: list[tuple[tuple[int, int], dict[str, Any]]] = []
        """Try and number of each part, and its entries."""
        self._written = 0
        self._is_clean = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the changes of a record with `nodes` and `tries`; a changed entry is a new object.

        Raise ArtifactError if the store has the record of a later try, because another host took this process for
        killed.
        """
        found: Any = None
        with contextlib.suppress(ArtifactError):
            found = head(self._store, self._name)
        if isinstance(found, dict) and found.get("tries", 1) > record.get("tries", 1):
            raise ArtifactError(
                f"run {self._name} counted as killed, and {found.get('host')} has resumed it: this process does not "
                "write its record any more"
            )
        nodes: Mapping[str, Any] = record["nodes"]
        self._drop_changed(nodes)
        left = list(nodes.items())[sum(len(entries) for _, entries in self._parts) :]
        while len(left) > PART and all(entry["state"] != "running" for _, entry in left[:PART]):
            self._add(record.get("tries", 1), dict(left[:PART]))
            left = left[PART:]
        named = {PARTS: _spans(part for part, _ in self._parts)} if self._parts else {}
        self._store.write_json({**record, "nodes": dict(left)} | named, FOLDER, self._name, HEAD)
        if not self._is_clean:
            self._remove_others()
            self._is_clean = True

    def _add(self, tries: int, entries: dict[str, Any]) -> None:
        # Names are unique, because another process may read the previous head and its parts now.
        self._store.write_json(entries, FOLDER, self._name, _part(tries, self._written))
        self._parts.append(((tries, self._written), entries))
        self._written += 1

    def _drop_changed(self, nodes: Mapping[str, Any]) -> None:
        """Forget parts from the first one with a changed or removed entry on."""
        place = 0
        order = list(nodes)
        for number, (_, entries) in enumerate(self._parts):
            same = order[place : place + len(entries)] == list(entries)
            if not same or any(nodes[name] is not entry for name, entry in entries.items()):
                del self._parts[number:]
                self._is_clean = False
                return
            place += len(entries)

    def _remove_others(self) -> None:
        """Remove parts that the head does not name: of an earlier try, or replaced ones."""
        mine = {_part(*part) for part, _ in self._parts}
        for name in self._store.names(FOLDER, self._name):
            if name.startswith("nodes-") and name not in mine:
                with contextlib.suppress(FileNotFoundError):
                    self._store.remove(self._store.join(FOLDER, self._name, name))

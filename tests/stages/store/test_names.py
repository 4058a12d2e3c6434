"""A name in a file of the store is no path: whoever may write to a store writes and deletes nothing outside of it."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf.flows.recipe.retention import Retention
from rlhf.flows.records import UnknownRun, candidates, readable_runs
from rlhf.flows.retention import roots_of
from rlhf.stages.contract.source_archive import kept
from rlhf.stages.store import audit_log, registry
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.audit_log import append, events
from rlhf.stages.store.collect import Limits, collect
from rlhf.stages.store.damage import set_aside
from rlhf.stages.store.keys import digest
from rlhf.stages.store.pins import pin, pins
from rlhf.stages.store.registry import Policy
from rlhf.stages.store.work import WorkFolder
from tests.stages.store.graphs import put
from tests.support import write_files

OUTSIDE = "../../../../../x"
"""Of any file of the store, one of the folders above it, each of which has something to lose."""
ANSWERS = (ArtifactError, UnknownRun, OSError, KeyError, ValueError)
NAMES = {"name", "key", "folder", "path", "place"}
"""Fields that the fast variant changes."""
RECIPE = {"name": "smoke", "rl": None, "workers": None}
SUMS = digest("weights")


def filled(store: Store) -> None:
    """Everything in a store that has names in it."""
    old = put(store, 1)
    new = put(store, 1, [old], content="new", replace=True)
    policy = Policy("one", "sft", new.stage, new.key, new.digest, old.key, old.digest)
    registry.promote(store, "champion", policy, "first")
    node = {"stage": new.stage, "key": new.key, "digest": new.digest, "state": "made"}
    run = {"name": "one", "status": "finished", "started": "2026-01-01T00:00:00+00:00", "recipe": RECIPE}
    store.write_json(run | {"nodes": {"sft": node}, "log": "worker.log"}, "runs", "one", "run.json")
    pin(store, "one")
    append(store, "pin", run="one")
    gone = put(store, 2)
    place = ["artifacts", gone.stage, gone.key, "manifest.json"]
    store.write_json(gone.manifest, "condemned", gone.stage, f"{gone.key}.json")
    store.remove(store.join(*place))
    store.write_json({"token": "t", "pid": 1, "started": 1.0, "host": "far", "beat": 0.0}, "leases", "sft-k.json")
    store.write_json({"shard": SUMS}, "work", "sft", "k", ".mirrored", "checkpoints", "5")
    store.write_bytes(b"weights", "work", "sft", "k", "checkpoints", "5", "shard")


def texts(value: Any) -> Iterator[tuple[list[Any], bool]]:
    """The place of each text and of each name in a JSON value."""
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(key, str):
            yield [key], True
        if isinstance(child, str):
            yield [key], False
        elif isinstance(child, dict | list):
            yield from (([key, *rest], is_name) for rest, is_name in texts(child))


def changed(value: Any, place: list[Any], is_name: bool, to: str) -> Any:
    value = json.loads(json.dumps(value))
    at = value
    for key in place[:-1]:
        at = at[key]
    if is_name:
        at[to] = at.pop(place[-1])
    else:
        at[place[-1]] = to
    return value


def read_all(store: Store, scratch: Path) -> None:
    """What commands and stages do with these files, among it all that writes or deletes by a name."""

    def rolled() -> None:
        entry = registry.current(store, "champion")
        registry.trained_ref(store, entry.policy)
        registry.rollback(store, "champion", None, "")

    def found() -> None:
        for stage, key in store.all_keys():
            artifact = store.get(stage, key)
            if artifact is not None:
                artifact.local()
            set_aside(store, stage, key, print)

    actions = (
        found,
        rolled,
        lambda: WorkFolder(store, "sft", "k").open(),
        lambda: WorkFolder(store, "sft", "k").drop(),
        lambda: kept(store, {"sources": {}, "code": {}}),
        lambda: (pins(store), events(store), readable_runs(store)),
        lambda: candidates(store, "one"),
        lambda: collect(store, lambda: roots_of(store, Retention(keep=0)), Limits(-60.0, 0.0)),
    )
    for action in actions:
        with contextlib.suppress(*ANSWERS):
            action()


@pytest.mark.parametrize("kind", ["names", "remote", pytest.param("all texts", marks=pytest.mark.slow)])
def test_no_text_in_the_json_of_a_store_is_a_path_out_of_it(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(audit_log, "checkout", lambda folder: {})
    monkeypatch.setattr(os, "fsync", lambda file: None)
    deep = tmp_path.joinpath(*"abcde")
    store = Store(str(deep / "store") if kind != "remote" else f"memory://{tmp_path.name}", scratch=deep / "scratch")
    filled(store)
    files = {p[len(store.root) + 1 :]: store.fs.cat_file(p) for p in store.fs.find(store.root)}
    values = {p: json.loads(data) for p, data in files.items() if not p.endswith((".txt", ".bin", "shard"))}
    assert len(values) >= 9
    if kind == "remote":
        # Of which local files are named after those of the store.
        values = {p: value for p, value in values.items() if p.startswith("work")}
    victims = [folder / "x" for folder in (deep, *deep.parents) if folder.is_relative_to(tmp_path)]
    tried = 0
    for path, value in values.items():
        for place, is_name in texts(value):
            if kind == "names" and (is_name or not path.startswith(("runs", "condemned")) or not NAMES & set(place)):
                continue
            tried += 1
            shutil.rmtree(tmp_path / "a")
            if kind == "remote":
                store.fs.rm(store.root, recursive=True)
            for victim in victims:
                write_files(victim, **{"run.json": "{}", "data": "mine"})
            for name, data in files.items():
                store.write_bytes(data, *name.split("/"))
            store.write_json(changed(value, place, is_name, OUTSIDE), *path.split("/"))
            read_all(store, deep / "scratch")
            for victim in victims:
                there = {p.name: p.read_text() for p in victim.iterdir()} if victim.is_dir() else None
                assert there == {"run.json": "{}", "data": "mine"}, (path, place, victim)
    assert tried > (60 if kind == "all texts" else 1)

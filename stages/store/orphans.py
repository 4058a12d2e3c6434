"""Leftovers in a store that belong to no artifact: abandoned work, damaged artifacts, half-written files.

Each has an age, the time since its newest file was written, and is deleted only if it is older than the grace time. A
leftover of unknown age stays.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from rlhf.stages.store.artifacts import MANIFEST, Store
from rlhf.stages.store.leases import beats, remove_stale, unless_held
from rlhf.stages.store.reachability import Roots, Version
from rlhf.stages.store.work import OF_PROCESS
from rlhf.tuning.atomic import is_partial

KEY_CHARACTERS = 64
"""Length of a key, with which names of folders of fetched files and of work begin."""


@dataclasses.dataclass(frozen=True)
class Residue:
    """A file or folder to delete."""

    kind: str
    name: str
    bytes: int
    remove: Callable[[], object]


def residues(store: Store, found: list[Version], roots: Roots, old: float) -> Iterator[Residue]:
    """Yield the leftovers of a store and of this machine's scratch folder.

    found: all artifacts of the store. old: a moment in seconds since 1970; files written after it stay.
    """
    owned = {(v.stage, folder) for v in found for folder in (v.key, v.folder)}
    for stage in store.names("artifacts"):
        for folder in store.names("artifacts", stage):
            parts = ("artifacts", stage, folder)
            # `rlhf verify` sets aside a folder whose manifest cannot be read.
            if (stage, folder) not in owned and not store.exists(*parts, MANIFEST):
                yield from _unless_made(store, stage, folder.split(".")[0], _remote(store, "orphan", parts, old))
    kept = [run for run in roots.runs if run.why]
    pending = {place for run in kept for place in run.pending}

    work = [
        (stage, name, _remote(store, "work", ("work", stage, name), old))
        for stage in store.names("work")
        for name in store.names("work", stage)
    ]
    if not store.is_local:
        work += [(path.parent.name, path.name, _local("work", path, old)) for path in _below(store.scratch / "work", 2)]
    for stage, folder, leftovers in work:
        # After the key: the number of a process of a group, the run that has forced the stage.
        key = folder[:KEY_CHARACTERS].partition(OF_PROCESS)[0]
        if (stage, key) not in pending:
            yield from _unless_made(store, stage, key, leftovers)
    yield from _remote(store, "damaged", ("damaged",), old)
    yield from _leases(store, old)
    if not store.is_local:
        keys = {version.key for version in found}
        for path in _below(store.scratch / "fetched", 2):
            if path.name[:KEY_CHARACTERS] not in keys:
                yield from _local("fetched", path, old)
        names = {run.name for run in kept}
        for path in _below(store.scratch / "runs", 1):
            if path.name not in names:
                yield from _local("log", path, old)
    # A worker that is at work writes its servers' weights again where they are gone.
    for path in _below(store.scratch / "engines", 1):
        yield from _local("weights", path, old)
    for path in sorted(filter(is_partial, store.scratch.rglob(".*.part"))):
        yield from _local("partial", path, old)


def _unless_made(store: Store, stage: str, key: str, leftovers: Iterator[Residue]) -> Iterator[Residue]:
    """Yield leftovers of a key that no process makes; each is removed under the lease of the key."""
    for residue in () if beats(store, stage, key) else leftovers:

        def remove(check: Callable[[], None], residue: Residue = residue) -> None:
            check()
            residue.remove()

        yield dataclasses.replace(residue, remove=functools.partial(unless_held, store, stage, key, remove))


def _leases(store: Store, old: float) -> Iterator[Residue]:
    for name in store.names("leases"):
        stage, dash, key = name.removesuffix(".json").partition("-")
        if dash and not beats(store, stage, key):
            for residue in _remote(store, "lease", ("leases", name), old):
                yield dataclasses.replace(residue, remove=functools.partial(remove_stale, store, stage, key))


def _remote(store: Store, kind: str, parts: tuple[str, ...], old: float) -> Iterator[Residue]:
    """Yield a file or folder of the store, if it is old."""
    path = store.join(*parts)
    yield from _old(store.fs, kind, "/".join(parts), path, old, functools.partial(store.remove_folder, path))


def _local(kind: str, path: Path, old: float) -> Iterator[Residue]:
    """Yield a file or folder of this machine, if it is old."""
    fs = LocalFileSystem()
    yield from _old(fs, kind, str(path), str(path), old, functools.partial(fs.rm, str(path), recursive=True))


def _old(fs: Any, kind: str, name: str, path: str, old: float, remove: Callable[[], object]) -> Iterator[Residue]:
    files = fs.find(path, detail=True)
    # Only a local file system has empty folders.
    if not files and isinstance(fs, LocalFileSystem) and os.path.isdir(path):
        files = {path: fs.info(path) | {"size": 0}}
    if files and max(map(written, files.values())) < old:
        yield Residue(kind, name, sum(info["size"] or 0 for info in files.values()), remove)


def _below(folder: Path, depth: int) -> list[Path]:
    return sorted(path for path in folder.glob("/".join("*" * depth)) if path.is_dir() and not is_partial(path))


def written(info: dict[str, Any]) -> float:
    """Return when a file was written, in seconds since 1970, by fsspec's `info`; infinity if that has no time."""
    names = ("mtime", "LastModified", "last_modified", "updated", "created")
    value = next((info[name] for name in names if info.get(name) is not None), math.inf)
    if isinstance(value, str):
        value = datetime.datetime.fromisoformat(value)
    return value.timestamp() if isinstance(value, datetime.datetime) else float(value)

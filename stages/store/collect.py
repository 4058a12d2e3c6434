"""Garbage collection: deletes what no kept run reaches, and nothing else.

1. It moves the manifest of each unreachable artifact to `condemned/`, under the artifact's lease. From then on no run
   finds the artifact.
2. It reads the roots again. A run writes its record before it asks for artifacts, and at most `SETTLE_SECONDS` after it
   has found one; if a run is active, the collection waits that long first. It restores the manifest of a condemned
   artifact that is reachable now, unless a process recomputes it.
3. It deletes the files of the others under the lease, then their entries in `condemned/`.
4. It deletes records of runs, and leftovers.

Each step on an artifact holds its lease, checks it before each removal, and is skipped while a live process has it.
The next collection finishes one that was killed. The trail (`audit_log.py`) has an entry from before the first deletion
and one from the end.

Leftovers in a store that belong to no artifact: abandoned work, damaged artifacts, half-written files.

Each has an age, the time since its newest file was written, and is deleted only if it is older than the grace time. A
leftover of unknown age stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from rlhf.stages.store import audit_log, readonly, runs
from rlhf.stages.store.artifacts import MANIFEST, Store
from rlhf.stages.store.json_schemas import COMMITTED
from rlhf.stages.store.leases import beats, is_alive, remove_stale, unless_held
from rlhf.stages.store.reachability import Roots, Version, reach, versions
from rlhf.stages.store.reserve import keep_room, with_room
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
    # A live worker that is not seen from here writes its servers' weights again.
    for path in _below(store.scratch / "engines", 1):
        for residue in () if is_alive(path.name) else _local("weights", path, old):
            yield dataclasses.replace(residue, remove=functools.partial(_unless_alive, path.name, residue.remove))
    for path in sorted(filter(is_partial, store.scratch.rglob(".*.part"))):
        yield from _local("partial", path, old)


def _unless_made(store: Store, stage: str, key: str, leftovers: Iterator[Residue]) -> Iterator[Residue]:
    """Yield leftovers of a key that no process makes; each is removed under the lease of the key."""
    for residue in () if beats(store, stage, key) else leftovers:

        def remove(check: Callable[[], None], residue: Residue = residue) -> None:
            check()
            residue.remove()

        yield dataclasses.replace(residue, remove=functools.partial(unless_held, store, stage, key, remove))


def _unless_alive(folder: str, remove: Callable[[], object]) -> object:
    # Another worker may have got the number meanwhile.
    return False if is_alive(folder) else remove()


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


SETTLE_SECONDS = 10.0
"""Longer than a run takes from finding an artifact to naming it in its record."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a collection by age and size."""

    grace_seconds: float = 3600.0
    """Nothing younger is deleted."""
    settle_seconds: float = SETTLE_SECONDS
    sign_seconds: float = 60.0 + SETTLE_SECONDS
    """Within this time a live run gives a sign of life (`flows/running/session.py`)."""


@dataclasses.dataclass(frozen=True)
class Survey:
    """The deletions of a collection, with reasons."""

    roots: Roots
    kept: tuple[tuple[Version, str], ...]
    """Artifacts that stay, each with the reason."""
    garbage: tuple[Version, ...]
    residues: tuple[Residue, ...]

    @property
    def runs(self) -> list[str]:
        """Names of the runs whose records are deleted."""
        return sorted(self.roots.gone)

    @property
    def freed(self) -> int:
        """Bytes of all deletions."""
        return sum(v.size for v in self.garbage) + sum(r.bytes for r in self.residues)

    def as_json(self) -> dict[str, Any]:
        """Return the survey for the trail and `--json`; sizes are in bytes."""
        return {
            "freed_bytes": self.freed,
            "kept_bytes": sum(version.size for version, _ in self.kept),
            "runs": {run.name: run.why or None for run in self.roots.runs},
            "artifacts": [{"stage": v.stage, "key": v.key, "digest": v.digest, "bytes": v.size} for v in self.garbage],
            "kept": [{"stage": v.stage, "key": v.key, "bytes": v.size, "why": why} for v, why in self.kept],
            "residues": [{"kind": r.kind, "name": r.name, "bytes": r.bytes} for r in self.residues],
        }


def survey(store: Store, roots: Roots, limits: Limits) -> Survey:
    """Return what a collection would delete now. Writes nothing."""
    old = time.time() - limits.grace_seconds
    roots = roots.since(old)
    found = versions(store)
    kept = reach(found, roots, old)
    return Survey(
        roots=roots,
        kept=tuple((v, kept[v.identity]) for v in found if v.identity in kept),
        garbage=tuple(v for v in found if v.identity not in kept),
        residues=tuple(residues(store, found, roots, old)),
    )


def collect(store: Store, read: Callable[[], Roots], limits: Limits) -> Survey:
    """Delete what is unreachable from the roots that `read` returns; return the deletions.

    read: returns what runs, pins and the registry keep now; called more than once.
    """
    readonly.refuse(store)
    done = with_room(store, lambda: _collected(store, read, limits))
    keep_room(store)
    return done


def _collected(store: Store, read: Callable[[], Roots], limits: Limits) -> Survey:
    roots = read()
    first = survey(store, roots, limits)
    signs = {run.name: run.sign for run in roots.runs if run.sign}
    if signs and (first.garbage or first.residues or first.runs):
        # Clocks of other hosts may be wrong, so a run is alive if its signs of life change.
        time.sleep(limits.sign_seconds)
        first = survey(store, read().living(signs), limits)
    interrupted = any(version.condemned for version, _ in first.kept)
    if not (first.garbage or first.residues or first.runs or interrupted):
        return first
    change = uuid.uuid4().hex
    audit_log.append(store, "gc", state="begun", change=change, **_short(first))
    for version in first.garbage:
        if not version.condemned:
            _condemn(store, version)
    # Only an active run can have found an artifact that its record does not name yet.
    roots = read().living(signs)
    if any(run.active for run in roots.runs):
        time.sleep(limits.settle_seconds)
        roots = read().living(signs)
    second = survey(store, roots, limits)
    roots = second.roots
    for version, _ in second.kept:
        if version.condemned:
            _restore(store, version)
    swept = tuple(version for version in second.garbage if version.condemned and _sweep(store, version))
    known = {residue.name for residue in first.residues}
    # Work that a process has leased meanwhile stays.
    rest = tuple(residue for residue in second.residues if residue.name in known and _removed(residue))
    # A run that began later is only in the second roots.
    ended = tuple(run for run in roots.runs if run.why or run.name in first.roots.gone)
    for name in sorted(roots.gone & first.roots.gone):
        _remove_run(store, name)
    done = dataclasses.replace(second, roots=Roots(ended, roots.named), garbage=swept, residues=rest)
    audit_log.append(store, "gc", state="finished", change=change, outcome=f"freed {done.freed} bytes", **_short(done))
    return done


def _short(done: Survey) -> dict[str, Any]:
    names = ("freed_bytes", "artifacts", "residues")
    return {name: value for name, value in done.as_json().items() if name in names} | {"runs": done.runs}


def _condemn(store: Store, version: Version) -> None:
    """Move a manifest to `condemned/`, unless a process makes the artifact or has replaced it."""

    def step(check: Callable[[], None]) -> None:
        manifest = store.read_record(COMMITTED, *version.place)
        if manifest is not None and manifest["committed"] == version.committed:
            store.write_json(manifest, *version.tomb)
            check()
            store.remove(store.join(*version.place))

    unless_held(store, version.stage, version.key, step)


def _restore(store: Store, version: Version) -> None:
    """Move the manifest of a condemned artifact back, unless the key has another one by now.

    While a process recomputes the artifact its entry stays, for the next collection.
    """

    def step(check: Callable[[], None]) -> None:
        manifest = store.read_json(*version.tomb)
        if manifest is not None and store.read_json(*version.place) is None:
            check()
            store.write_json(manifest, *version.place)
        _forget(store, version)

    unless_held(store, version.stage, version.key, step)


def _sweep(store: Store, version: Version) -> bool:
    """Delete the files of a condemned artifact; return False if a process recomputes it."""

    def step(check: Callable[[], None]) -> None:
        # Another collection may have deleted or restored it.
        if store.read_json(*version.tomb) is not None and not _in_use(store, version):
            _delete_files(store, version, check)
        _forget(store, version)

    return unless_held(store, version.stage, version.key, step)


def _in_use(store: Store, version: Version) -> bool:
    """Whether the folder of a condemned artifact belongs to another one, because the key was recomputed."""
    places: list[tuple[str, ...]] = [("artifacts", version.stage, version.key, MANIFEST)]
    places += [("replaced", version.stage, name) for name in store.names("replaced", version.stage)]
    others = (store.read_json(*place) for place in places if place[2].startswith(version.key))
    return any(other is not None and other.get("folder", version.key) == version.folder for other in others)


def _delete_files(store: Store, version: Version, check: Callable[[], None]) -> None:
    place = "artifacts", version.stage, version.folder
    folder = store.join(*place)
    # The folder of the key also holds the manifest of the artifact that has replaced this one.
    present = f"{folder}/{MANIFEST}"
    check()
    for path in store.fs.find(folder):
        if path != present:
            # On a local disk a process that takes the lease over may commit into the same folder.
            if store.is_local:
                check()
            with contextlib.suppress(FileNotFoundError):
                store.remove(path)
    if not store.exists(*place, MANIFEST):
        store.remove_folder(folder)


def _forget(store: Store, version: Version) -> None:
    with contextlib.suppress(FileNotFoundError):
        store.remove(store.join(*version.tomb))


def _removed(residue: Residue) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return residue.remove() is not False
    return True


def _remove_run(store: Store, name: str) -> None:
    # Without its record a run does not exist.
    with contextlib.suppress(FileNotFoundError):
        store.remove(store.join(runs.FOLDER, name, runs.HEAD))
    store.remove_folder(store.join(runs.FOLDER, name))

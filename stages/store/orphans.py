"""What is in a store and belongs to no artifact: work nobody goes on with, artifacts set aside, half-written files.

Everything here has an age, the time since its newest file was written, and goes only when it is older than the grace
time. What does not tell its age stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlhf.stages.store.artifacts import MANIFEST, Store
from rlhf.stages.store.leases import beats, forsaken, unless_held
from rlhf.stages.store.reachability import Roots, Version
from rlhf.stages.store.work import OF_PROCESS
from rlhf.tuning.atomic import is_partial

KEY_CHARACTERS = 64
"""Length of a key, with which names of folders of fetched files and of work begin."""
READERS = ".readers"
"""After a policy's digest: the folder of empty files with the names of the runs that are to read it
(`rlhf.stages.common.policy_handoff`)."""


@dataclasses.dataclass(frozen=True)
class Residue:
    """A file or folder that goes."""

    kind: str
    name: str
    bytes: int
    remove: Callable[[], object]


def residues(store: Store, found: list[Version], roots: Roots, old: float) -> Iterator[Residue]:
    """What goes of a store and of this machine's scratch folder.

    found: every artifact that is left.
    old: a moment in seconds since 1970; what was written after it stays.
    """
    pending = {place for run in roots.runs if run.why for place in run.pending}
    names = {run.name for run in roots.runs if run.why}
    active = {run.name for run in roots.runs if run.active}
    yield from _orphans(store, found, old)
    yield from _work(store, pending, old)
    yield from _remote(store, "damaged", ("damaged",), old)
    for name in store.names("handed"):
        if active.isdisjoint(store.names("handed", _readers(name))):
            yield from _remote(store, "policy", ("handed", name), old)
    for name in store.names("mail"):
        yield from _remote(store, "mail", ("mail", name), old)
    yield from _leases(store, old)
    keys = {version.key for version in found}
    for folder in _below(store.scratch / "fetched", 2):
        if not store.is_local and folder.name[:KEY_CHARACTERS] not in keys:
            yield from _local("fetched", folder, old)
    for folder in _below(store.scratch / "runs", 1):
        # On a local store it is the folder of the record, which goes with the run.
        if not store.is_local and folder.name not in names:
            yield from _local("log", folder, old)
    for path in sorted(store.scratch.rglob(".*.part")) if store.scratch.is_dir() else ():
        if is_partial(path):
            yield from _local("partial", path, old)


def compiled(folder: Path, limit: int) -> Iterator[Residue]:
    """Programs of JAX's compile cache that go so that it has at most `limit` bytes: those not used for the longest."""
    entries = []
    for path in folder.glob("*") if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                entries.append((_used(path), path.stat().st_size, path))
    left = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if left <= limit:
            return
        left -= size
        yield Residue("compiled", path.name, size, functools.partial(path.unlink, missing_ok=True))


def _readers(policy: str) -> str:
    """The folder of a policy's readers, by its own or by the policy's: they stay and go together."""
    return policy.removesuffix(READERS) + READERS


def _used(path: Path) -> float:
    # JAX notes each use of a program in a file beside it; where it does not, the access time of the file is left.
    beside = path.with_name(path.name.removesuffix("-cache") + "-atime")
    times = [path.stat().st_atime, path.stat().st_mtime]
    with contextlib.suppress(FileNotFoundError):
        times.append(beside.stat().st_mtime)
    return max(times)


def _orphans(store: Store, found: list[Version], old: float) -> Iterator[Residue]:
    """Folders of artifacts that no manifest names: a commit was killed in them."""
    owned = {(version.stage, version.folder) for version in found} | {(version.stage, version.key) for version in found}
    for stage in store.names("artifacts"):
        for folder in store.names("artifacts", stage):
            key = folder.split(".")[0]
            if (stage, folder) in owned or store.exists("artifacts", stage, folder, MANIFEST):
                # One with a manifest that cannot be read is `rlhf verify`'s.
                continue
            if not beats(store, stage, key):
                yield from _leased(store, stage, key, _remote(store, "orphan", ("artifacts", stage, folder), old))
    filled = {(version.stage, version.folder) for version in found}
    for version in found:
        if version.current and (version.stage, version.key) not in filled:
            yield from _leased(store, version.stage, version.key, _beside_manifest(store, version, old))


def _beside_manifest(store: Store, version: Version, old: float) -> Iterator[Residue]:
    """Files of a killed commit in the folder that has nothing but the manifest of a later one."""
    folder = store.join("artifacts", version.stage, version.key)
    for path, info in store.fs.find(folder, detail=True).items():
        if path != f"{folder}/{MANIFEST}" and written(info) < old:
            name = f"artifacts/{version.stage}/{path[len(folder) - len(version.key) :]}"
            yield Residue("orphan", name, info["size"] or 0, functools.partial(store.remove, path))


def _work(store: Store, pending: set[tuple[str, str]], old: float) -> Iterator[Residue]:
    def left(stage: str, folder: str, found: Iterator[Residue]) -> Iterator[Residue]:
        # After the key: the number of a process of a group, the run that has forced the stage.
        key = folder[:KEY_CHARACTERS].partition(OF_PROCESS)[0]
        if (stage, key) not in pending and not beats(store, stage, key):
            yield from _leased(store, stage, key, found)

    for stage in store.names("work"):
        for name in store.names("work", stage):
            yield from left(stage, name, _remote(store, "work", ("work", stage, name), old))
    for folder in () if store.is_local else _below(store.scratch / "work", 2):
        yield from left(folder.parent.name, folder.name, _local("work", folder, old))


def _leased(store: Store, stage: str, key: str, found: Iterator[Residue]) -> Iterator[Residue]:
    """The residues, each removed under the lease of a key, and not while a process makes that."""
    for residue in found:

        def remove(check: Callable[[], None], residue: Residue = residue) -> bool:
            check()
            residue.remove()
            return True

        yield dataclasses.replace(residue, remove=functools.partial(unless_held, store, stage, key, remove))


def _leases(store: Store, old: float) -> Iterator[Residue]:
    for name, remove in forsaken(store):
        with contextlib.suppress(FileNotFoundError):
            info = store.fs.info(store.join("leases", name))
            if written(info) < old:
                yield Residue("lease", f"leases/{name}", info["size"] or 0, remove)


def _remote(store: Store, kind: str, parts: tuple[str, ...], old: float) -> Iterator[Residue]:
    """A folder of the store, where it is there and old."""
    path = store.join(*parts)
    files = store.fs.find(path, detail=True)
    if not files:
        # An object store has no empty folders; a local one tells the age of one by itself.
        if not store.is_local or not os.path.isdir(path):
            return
        files = {path: {"size": 0, "mtime": os.stat(path).st_mtime}}
    if max(written(info) for info in files.values()) < old:
        size = sum(info["size"] or 0 for info in files.values())
        yield Residue(kind, "/".join(parts), size, lambda: store.remove_folder(path))


def _local(kind: str, path: Path, old: float) -> Iterator[Residue]:
    """A file or folder of this machine, where it is there and old."""
    newest, size = 0.0, 0
    for each in [path, *(path.rglob("*") if path.is_dir() else ())]:
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, each.stat().st_mtime)
            size += each.stat().st_size if each.is_file() else 0
    if 0 < newest < old:
        yield Residue(kind, str(path), size, lambda: _delete(path))


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _below(folder: Path, depth: int) -> list[Path]:
    return sorted(path for path in folder.glob("/".join("*" * depth)) if path.is_dir() and not is_partial(path))


def written(info: dict[str, Any]) -> float:
    """When a file was written, from what a file system tells of it, in seconds since 1970; infinity where it does not
    tell: such a file is never old."""
    for name in ("mtime", "LastModified", "updated", "created"):
        value = info.get(name)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.datetime.fromisoformat(value).timestamp()
    return float("inf")

"""Garbage collection: what no kept run reaches is freed, and nothing else.

1. The manifest of each unreachable artifact is moved to `condemned/`, under the artifact's lease. From then on no run
   finds it.
2. The roots are read again. A run writes its record before it asks for artifacts, and at most `SETTLE_SECONDS` after it
   has found one, whatever it waits for; where one is under way, this long is waited first. A condemned artifact that is
   reachable by now gets its manifest back, unless a process makes it again.
3. The files of the others are deleted, under the lease, then their entry in `condemned/`.
4. Records of runs that go, and residues (`stages/store/orphans.py`), are deleted.

Each step on an artifact holds its lease, checks it before each removal, and is left out while a live process has it.
A collection that is killed is finished by the next one. The trail (`audit_log.py`) has an entry from before the first
deletion and one from the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.stages.store import audit_log, runs
from rlhf.stages.store.artifacts import MANIFEST, Store
from rlhf.stages.store.json_schemas import TOMB
from rlhf.stages.store.leases import unless_held
from rlhf.stages.store.manifests import checksum_of
from rlhf.stages.store.orphans import Residue, compiled, residues
from rlhf.stages.store.reachability import CONDEMNED, Roots, Version, reach, tomb, versions
from rlhf.stages.store.reserve import keep_room, with_room

SETTLE_SECONDS = 10.0
"""Longer than a run takes from finding an artifact to writing that into its record."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What age and size decide."""

    grace_seconds: float = 3600.0
    """What is younger is never taken."""
    settle_seconds: float = SETTLE_SECONDS
    sign_seconds: float = 60.0 + SETTLE_SECONDS
    """Within so long a run gives a sign of life (`flows/running/record_writer.py`)."""
    compile_cache: Path | None = None
    """JAX's compile cache; None: left alone."""
    compile_bytes: int = 10 * 2**30
    """What the compile cache may take."""


@dataclasses.dataclass(frozen=True)
class Survey:
    """What a collection would do, and why."""

    roots: Roots
    kept: tuple[tuple[Version, str], ...]
    """Artifacts that stay, each with the reason."""
    garbage: tuple[Version, ...]
    residues: tuple[Residue, ...]

    @property
    def runs(self) -> list[str]:
        """Names of the runs whose records go."""
        return sorted(self.roots.gone)

    @property
    def freed(self) -> int:
        """Bytes that it frees."""
        return sum(v.size for v in self.garbage) + sum(r.bytes for r in self.residues)

    def as_json(self) -> dict[str, Any]:
        """The survey as the trail and `--json` have it; sizes are in bytes."""
        return {
            "freed_bytes": self.freed,
            "kept_bytes": sum(version.size for version, _ in self.kept),
            "runs": {run.name: run.why or None for run in self.roots.runs},
            "artifacts": [{"stage": v.stage, "key": v.key, "digest": v.digest, "bytes": v.size} for v in self.garbage],
            "kept": [{"stage": v.stage, "key": v.key, "bytes": v.size, "why": why} for v, why in self.kept],
            "residues": [{"kind": r.kind, "name": r.name, "bytes": r.bytes} for r in self.residues],
        }


def survey(store: Store, roots: Roots, limits: Limits) -> Survey:
    """What a collection would free now. Writes nothing."""
    old = time.time() - limits.grace_seconds
    roots = roots.since(old)
    found = versions(store)
    kept = reach(found, roots, old)
    rest = list(residues(store, found, roots, old))
    if limits.compile_cache is not None:
        rest += compiled(limits.compile_cache, limits.compile_bytes)
    return Survey(
        roots=roots,
        kept=tuple((v, kept[v.identity]) for v in found if v.identity in kept),
        garbage=tuple(v for v in found if v.identity not in kept),
        residues=tuple(rest),
    )


def collect(store: Store, read: Callable[[], Roots], limits: Limits) -> Survey:
    """Frees what is unreachable from the roots that `read` returns, and returns what was freed.

    read: called more than once; what runs, pins and the registry hold at that moment.
    """
    done = with_room(store, lambda: _collected(store, read, limits))
    keep_room(store)
    return done


def _collected(store: Store, read: Callable[[], Roots], limits: Limits) -> Survey:
    roots = read()
    first = survey(store, roots, limits)
    signs = {run.name: run.sign for run in roots.runs if run.sign}
    if signs and (first.garbage or first.residues or first.runs):
        # No clock of another host says whether its runs live: what changes does.
        time.sleep(limits.sign_seconds)
        first = survey(store, read().living(signs), limits)
    interrupted = any(version.tomb is not None for version, _ in first.kept)
    if not (first.garbage or first.residues or first.runs or interrupted):
        return first
    change = uuid.uuid4().hex
    audit_log.append(store, "gc", state="begun", change=change, **_short(first))
    for version in first.garbage:
        if version.tomb is None:
            _condemn(store, version)
    # Only a run that is under way can have found something that its record does not name yet.
    roots = read().living(signs)
    if roots.active:
        time.sleep(limits.settle_seconds)
        roots = read().living(signs)
    second = survey(store, roots, limits)
    roots = second.roots
    for version, _ in second.kept:
        if version.tomb is not None and not version.swept:
            _restore(store, version)
    swept = tuple(version for version in second.garbage if version.tomb is not None and _sweep(store, version))
    known = {residue.name for residue in first.residues}
    rest = tuple(residue for residue in second.residues if residue.name in known)
    # One that a process has leased meanwhile stays.
    rest = tuple(residue for residue in rest if _removed(residue))
    # A run that has begun since is among the second roots alone.
    ended = tuple(run for run in roots.runs if run.why or run.name in first.roots.gone)
    for name in sorted(roots.gone & first.roots.gone):
        _remove_run(store, name)
    done = dataclasses.replace(second, roots=Roots(ended, roots.named), garbage=swept, residues=rest)
    audit_log.append(store, "gc", state="finished", change=change, outcome=f"freed {done.freed} bytes", **_short(done))
    return done


def _short(done: Survey) -> dict[str, Any]:
    names = ("freed_bytes", "artifacts", "residues")
    return {name: value for name, value in done.as_json().items() if name in names} | {"runs": done.runs}


def _condemn(store: Store, version: Version) -> bool:
    """Moves a manifest to `condemned/`, unless the artifact is being made or was replaced meanwhile."""

    def step(check: Callable[[], None]) -> bool:
        manifest = store.read_json(*version.place)
        if manifest is None or checksum_of(manifest) != version.checksum:
            return False
        value = {"place": list(version.place), "manifest": manifest, "swept": False}
        store.write_json(value, CONDEMNED, version.stage, version.identity)
        check()
        store.remove(store.join(*version.place))
        return True

    return unless_held(store, version.stage, version.key, step)


def _restore(store: Store, version: Version) -> bool:
    """Gives a condemned artifact its manifest back, unless its key was made again since. While a process makes it
    again its entry stays, for the next collection."""

    def step(check: Callable[[], None]) -> bool:
        now = tomb(store, version.stage, str(version.tomb))
        if now is None or now.swept:
            return False
        if store.read_json(*version.place) is None:
            check()
            store.write_json(_tomb_of(store, version)["manifest"], *version.place)
        _forget(store, version)
        return True

    return unless_held(store, version.stage, version.key, step)


def _tomb_of(store: Store, version: Version) -> dict[str, Any]:
    """The record of a condemned artifact, whose lease is held."""
    record = store.read_record(TOMB, *_entry(version))
    if record is None:
        raise FileNotFoundError(store.address(*_entry(version)))
    return record


def _sweep(store: Store, version: Version) -> bool:
    """Deletes the files of a condemned artifact; False where another process has dealt with it, or makes it again."""

    def step(check: Callable[[], None]) -> bool:
        now = tomb(store, version.stage, str(version.tomb))
        if now is None:
            return False
        if not _in_use(store, now):
            # From here on it cannot be whole again.
            check()
            store.write_json({**_tomb_of(store, version), "swept": True}, *_entry(version))
            _delete_files(store, now, check)
        _forget(store, version)
        return True

    return unless_held(store, version.stage, version.key, step)


def _in_use(store: Store, version: Version) -> bool:
    """Whether the folder of a condemned artifact belongs to another one by now: the key was made again."""
    folders = []
    present = store.read_json("artifacts", version.stage, version.key, MANIFEST)
    if present is not None:
        folders.append(present.get("folder", version.key))
    for name in store.names("replaced", version.stage):
        other = store.read_json("replaced", version.stage, name) if name.startswith(f"{version.key}-") else None
        if other is not None and ("replaced", version.stage, name) != version.place:
            folders.append(other.get("folder", version.key))
    return version.folder in folders


def _delete_files(store: Store, version: Version, check: Callable[[], None]) -> None:
    place = "artifacts", version.stage, version.folder
    folder = store.join(*place)
    # The folder of the key also holds the manifest of the artifact that has replaced this one.
    present = f"{folder}/{MANIFEST}"
    check()
    for path in store.fs.find(folder):
        if path != present:
            # On a local disk whoever takes over may commit into the same folder.
            if store.is_local:
                check()
            with contextlib.suppress(FileNotFoundError):
                store.remove(path)
    if not store.exists(*place, MANIFEST):
        store.remove_folder(folder)


def _entry(version: Version) -> tuple[str, str, str]:
    """Where a condemned artifact's manifest is."""
    return CONDEMNED, version.stage, str(version.tomb)


def _forget(store: Store, version: Version) -> None:
    with contextlib.suppress(FileNotFoundError):
        store.remove(store.join(*_entry(version)))


def _removed(residue: Residue) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return residue.remove() is not False
    return True


def _remove_run(store: Store, name: str) -> None:
    # The record goes first: without it there is no run.
    with contextlib.suppress(FileNotFoundError):
        store.remove(store.join(runs.FOLDER, name, runs.HEAD))
    store.remove_folder(store.join(runs.FOLDER, name))

"""Garbage collection: deletes what no kept run reaches, and nothing else.

1. It moves the manifest of each unreachable artifact to `condemned/`, under the artifact's lease. From then on no run
   finds the artifact.
2. It reads the roots again. A run writes its record before it asks for artifacts, and at most `SETTLE_SECONDS` after it
   has found one; if a run is active, the collection waits that long first. It restores the manifest of a condemned
   artifact that is reachable now, unless a process recomputes it.
3. It deletes the files of the others under the lease, then their entries in `condemned/`.
4. It deletes records of runs, and leftovers (`rlhf.stages.store.orphans`).

Each step on an artifact holds its lease, checks it before each removal, and is skipped while a live process has it.
The next collection finishes one that was killed. The trail (`audit_log.py`) has an entry from before the first deletion
and one from the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Callable
from typing import Any

from rlhf.stages.store import audit_log, readonly, runs
from rlhf.stages.store.artifacts import MANIFEST, Store
from rlhf.stages.store.json_schemas import COMMITTED
from rlhf.stages.store.leases import unless_held
from rlhf.stages.store.orphans import Residue, residues
from rlhf.stages.store.reachability import Roots, Version, reach, versions
from rlhf.stages.store.reserve import keep_room, with_room

SETTLE_SECONDS = 10.0
"""Longer than a run takes from finding an artifact to naming it in its record."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a collection by age and size."""

    grace_seconds: float = 3600.0
    """Nothing younger is deleted."""
    settle_seconds: float = SETTLE_SECONDS
    sign_seconds: float = 60.0 + SETTLE_SECONDS
    """Within this time a live run gives a sign of life (`flows/running/record_writer.py`)."""


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
    readonly.refuse(store.shown)
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

"""What is reachable in a store: from the runs that are kept, through the inputs of what they made.

An artifact stays with everything that it was made from. A policy between two stored rounds can therefore be replayed
from its parent, rollouts and scores, down to the nearest stored state, and what a kept run reads is a hit.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf.stages.store.artifacts import MANIFEST, ArtifactError, Store
from rlhf.stages.store.json_schemas import COMMITTED, TOMB
from rlhf.stages.store.keys import digest
from rlhf.stages.store.manifests import checksum_of, strange
from rlhf.stages.store.runs import in_parallel

CONDEMNED = "condemned"
"""The folder of manifests that were taken away and whose files are about to be deleted."""

Ref = tuple[str, str, str]
"""Stage, key and digest of an artifact; an empty digest stands for whatever the key has now."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as a collection sees it."""

    name: str
    why: str
    """Why it stays; empty: it goes."""
    active: bool
    """Whether its process lives: it may name more artifacts at any moment."""
    refs: tuple[Ref, ...]
    pending: frozenset[tuple[str, str]] = frozenset()
    """(stage, key) of what it has begun and not finished: the work folders that it goes on from."""
    ended: float = 0.0
    """When it ended, or was last saved, in seconds since 1970."""
    sign: str = ""
    """The last sign of life of a run that seems killed on a host whose processes cannot be seen; its clock may be
    wrong."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Runs whose records its plan reads, each with why."""


@dataclasses.dataclass(frozen=True)
class Roots:
    """Everything that holds artifacts, read at one moment."""

    runs: tuple[Run, ...]
    named: frozenset[str] = frozenset()
    """Digests that a registry names, and its runs."""

    @property
    def active(self) -> bool:
        return any(run.active for run in self.runs)

    @property
    def gone(self) -> set[str]:
        """Names of the runs that go."""
        return {run.name for run in self.runs if not run.why}

    def living(self, signs: Mapping[str, str]) -> Roots:
        """The same, with the runs as running that have given another sign of life than that in `signs`."""
        moved = {run.name for run in self.runs if signs.get(run.name, run.sign) != run.sign}
        runs = (
            dataclasses.replace(run, why=run.why or "running", active=True) if run.name in moved else run
            for run in self.runs
        )
        return dataclasses.replace(self, runs=tuple(runs)).since(math.inf)

    def since(self, old: float) -> Roots:
        """The same, with the runs that stay because they ended after `old`, in seconds since 1970, or such a run needs
        them."""
        why = {run.name: run.why or ("too young" if run.ended > old else "") for run in self.runs}
        known = {run.name: run for run in self.runs}
        waiting = [name for name, reason in why.items() if reason]
        while waiting:
            for source, reason in known[waiting.pop()].sources.items():
                if why.get(source) == "":
                    why[source] = reason
                    waiting.append(source)
        return Roots(tuple(dataclasses.replace(run, why=why[run.name]) for run in self.runs), self.named)


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """One artifact with its own files: the present one of a key, or one that was replaced.

    A store has hundreds of thousands: of the manifest it holds what decides alone.
    """

    stage: str
    key: str
    digest: str
    folder: str
    committed: str
    """When, as its manifest says it."""
    size: int
    """Bytes of its files."""
    inputs: tuple[Ref, ...]
    checksum: str
    """Of its manifest."""
    place: tuple[str, ...]
    """Where its manifest is, or was before it was condemned: the parts of a path in the store."""
    tomb: str | None = None
    """The name of its file below `condemned/<stage>/`, where a collection has condemned it."""
    swept: bool = False
    """Whether the deletion of its files has begun."""

    @property
    def ref(self) -> Ref:
        return self.stage, self.key, self.digest

    @property
    def current(self) -> bool:
        return self.place[0] == "artifacts"

    @property
    def seconds(self) -> float:
        """When it was committed, in seconds since 1970."""
        return datetime.datetime.fromisoformat(self.committed).timestamp()

    @property
    def identity(self) -> str:
        return f"{self.key}-{digest([self.folder, self.committed, list(self.place)])[:8]}.json"


def version_of(manifest: dict[str, Any], place: tuple[str, ...], **more: Any) -> Version:
    """What a manifest says."""

    def ref(item: Mapping[str, str]) -> Ref:
        # The same few names and keys are in many manifests.
        stage, key, digest = (sys.intern(item.get(name, "")) for name in ("stage", "key", "digest"))
        return stage, key, digest

    stage, key, digest = ref(manifest)
    return Version(
        *(stage, key, digest),
        folder=sys.intern(manifest.get("folder", key)),
        committed=manifest["committed"],
        size=sum(file["size"] for file in manifest["files"]),
        inputs=tuple(map(ref, manifest.get("inputs", {}).values())),
        checksum=checksum_of(manifest),
        place=tuple(map(sys.intern, place)),
        **more,
    )


def versions(store: Store) -> list[Version]:
    """Every artifact of a store: present, replaced and condemned. One with a damaged manifest is left out: its files
    may be another's."""
    places: list[tuple[str, ...]] = []
    for stage in store.names("artifacts"):
        # A folder of files alone has a point in its name, and no manifest.
        places += [("artifacts", stage, key, MANIFEST) for key in store.names("artifacts", stage) if "." not in key]
    for stage in store.names("replaced"):
        places += [("replaced", stage, name) for name in store.names("replaced", stage)]
    found = list(in_parallel(store, functools.partial(_version, store), places))
    for stage in store.names(CONDEMNED):
        found += [tomb(store, stage, name) for name in store.names(CONDEMNED, stage)]
    return [version for version in found if version is not None]


def _version(store: Store, place: tuple[str, ...]) -> Version | None:
    try:
        manifest = store.read_record(COMMITTED, *place)
    except ArtifactError:
        # `rlhf verify` sets it aside.
        return None
    if manifest is None:
        return None
    key = place[2] if place[0] == "artifacts" else place[2].rpartition("-")[0]
    return None if strange(manifest, place[1], key) else version_of(manifest, place)


def tomb(store: Store, stage: str, name: str) -> Version | None:
    """The condemned artifact of this name; None where there is none any more.

    Raises ArtifactError for a file of another form: nobody knows what it stands for.
    """
    value = store.read_record(TOMB, CONDEMNED, stage, name)
    if value is None:
        return None
    manifest, place = value["manifest"], tuple(value["place"])
    key = manifest["key"]
    old = place[:2] == ("replaced", stage) and len(place) == 3 and place[2].startswith(f"{key}-")
    if strange(manifest, stage, key) or not (old or place == ("artifacts", stage, key, MANIFEST)):
        raise ArtifactError(f"{store.address(CONDEMNED, stage, name)} is of another artifact; move it away")
    return version_of(manifest, place, tomb=name, swept=value["swept"])


def reach(found: Iterable[Version], roots: Roots, young_since: float) -> dict[str, str]:
    """Identities of the artifacts that stay, each with the reason.

    young_since: what was committed after this moment (seconds since 1970) stays, with its inputs.
    """
    by_key: dict[tuple[str, str], list[Version]] = {}
    for version in found:
        by_key.setdefault((version.stage, version.key), []).append(version)
    # In order: a run that names an artifact is the reason before one that needs it further on.
    waiting: collections.deque[tuple[Version, str]] = collections.deque()

    def want(ref: Ref, why: str) -> None:
        for version in by_key.get(ref[:2], ()):
            if version.digest == ref[2] or (not ref[2] and version.current):
                waiting.append((version, why))

    for run in roots.runs:
        for ref in run.refs if run.why else ():
            want(ref, f"run {run.name}: {run.why}")
    for version in (v for group in by_key.values() for v in group):
        if roots.named & {version.key, version.digest}:
            waiting.append((version, "named by the registry"))
        if version.seconds >= young_since:
            waiting.append((version, "too young"))
    kept: dict[str, str] = {}
    while waiting:
        version, why = waiting.popleft()
        if version.identity in kept:
            continue
        kept[version.identity] = why
        below = f"{version.stage}/{version.key[:12]} needs it"
        for ref in version.inputs:
            want(ref, below)
        # Without a present artifact the next one would be written over the files of the one that it replaced.
        if not version.current:
            want((version.stage, version.key, ""), below)
    return kept

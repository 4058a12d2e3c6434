"""The artifacts of a store that kept runs reach, through the inputs of their artifacts.

An artifact stays with everything that it was made from. A policy between two stored rounds can therefore be replayed
from its parent, rollouts and scores, down to the nearest stored state, and inputs of a kept run are hits.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import math
import sys
from collections.abc import Iterable, Mapping

from rlhf.stages.store.artifacts import MANIFEST, ArtifactError, Store
from rlhf.stages.store.json_schemas import COMMITTED
from rlhf.stages.store.manifests import strange
from rlhf.stages.store.runs import in_parallel

CONDEMNED = "condemned"
"""The folder of manifests whose files a collection is about to delete."""

Ref = tuple[str, str, str]
"""Stage, key and digest of an artifact; an empty digest stands for the present one of the key."""

Identity = tuple[tuple[str, ...], bool]
"""Of a `Version`: its place, and whether it is condemned."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run, for a collection."""

    name: str
    why: str
    """Why it stays; empty: it is deleted."""
    active: bool
    """Whether its process lives: it may name more artifacts at any moment."""
    refs: tuple[Ref, ...]
    pending: frozenset[tuple[str, str]] = frozenset()
    """(stage, key) of the artifacts that it has begun and not finished: it resumes from their work folders."""
    ended: float = 0.0
    """When it ended, or was last saved, in seconds since 1970."""
    sign: str = ""
    """The last sign of life of a run that seems killed on another host, whose clock may be wrong."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Runs whose records its plan reads, each with the reason."""


@dataclasses.dataclass(frozen=True)
class Roots:
    """Everything that keeps artifacts, read at one moment."""

    runs: tuple[Run, ...]
    named: frozenset[str] = frozenset()
    """Digests and runs that the registry names."""

    @property
    def gone(self) -> set[str]:
        """Names of the runs to delete."""
        return {run.name for run in self.runs if not run.why}

    def living(self, signs: Mapping[str, str]) -> Roots:
        """Return these roots, where a run with another sign of life than that in `signs` is running."""
        moved = {run.name for run in self.runs if signs.get(run.name, run.sign) != run.sign}
        runs = (
            dataclasses.replace(run, why=run.why or "running", active=True) if run.name in moved else run
            for run in self.runs
        )
        return dataclasses.replace(self, runs=tuple(runs)).since(math.inf)

    def since(self, old: float) -> Roots:
        """Return these roots, where runs that ended after `old` (seconds since 1970) stay, and their sources."""
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
    """One artifact with its own files: the present one of a key, or a replaced one.

    A store has hundreds of thousands of them, so it holds only a few fields of the manifest.
    """

    stage: str
    key: str
    digest: str
    folder: str
    committed: str
    """Time of the commit, ISO 8601."""
    size: int
    """Bytes of its files."""
    inputs: tuple[Ref, ...]
    place: tuple[str, ...]
    """The path of its manifest in the store as parts, or, if it is condemned, the path before."""
    condemned: bool
    """Whether a collection has moved its manifest to `tomb`."""

    @property
    def ref(self) -> Ref:
        return self.stage, self.key, self.digest

    @property
    def current(self) -> bool:
        return self.place[0] == "artifacts"

    @property
    def seconds(self) -> float:
        """Time of the commit in seconds since 1970."""
        return datetime.datetime.fromisoformat(self.committed).timestamp()

    @property
    def identity(self) -> Identity:
        return self.place, self.condemned

    @property
    def tomb(self) -> tuple[str, str, str]:
        """The path of its manifest, as parts, once it is condemned."""
        return CONDEMNED, self.stage, f"{self.key}.json" if self.current else self.place[2]


def versions(store: Store) -> list[Version]:
    """Return every artifact of a store: present, replaced and condemned.

    One with a damaged manifest is left out, because its files may belong to another artifact.
    """
    places: list[tuple[str, ...]] = []
    for stage in store.names("artifacts"):
        # A folder of files alone has a point in its name, and no manifest.
        places += [("artifacts", stage, key, MANIFEST) for key in store.names("artifacts", stage) if "." not in key]
    for above in ("replaced", CONDEMNED):
        places += [(above, stage, name) for stage in store.names(above) for name in store.names(above, stage)]
    found = in_parallel(store, functools.partial(_version, store), places)
    return [version for version in found if version is not None]


def _version(store: Store, place: tuple[str, ...]) -> Version | None:
    try:
        manifest = store.read_record(COMMITTED, *place)
    except ArtifactError:
        # `rlhf verify` sets it aside.
        return None
    above, stage, name = place[:3]
    # Names in `replaced`: the key, "-", eight digits, ".json".
    key, replaced, _ = name.removesuffix(".json").partition("-")
    if manifest is None or strange(manifest, stage, key):
        return None

    def ref(item: Mapping[str, str]) -> Ref:
        # The same few names and keys are in many manifests.
        stage, key, digest = (sys.intern(item.get(name, "")) for name in ("stage", "key", "digest"))
        return stage, key, digest

    return Version(
        *ref(manifest),
        folder=sys.intern(manifest.get("folder", key)),
        committed=manifest["committed"],
        size=sum(file["size"] for file in manifest["files"]),
        inputs=tuple(map(ref, manifest.get("inputs", {}).values())),
        place=tuple(map(sys.intern, ("replaced", stage, name) if replaced else ("artifacts", stage, key, MANIFEST))),
        condemned=above == CONDEMNED,
    )


def reach(found: Iterable[Version], roots: Roots, young_since: float) -> dict[Identity, str]:
    """Return the identities of the artifacts that stay, each with the reason.

    young_since: artifacts committed after this moment (seconds since 1970) stay, with their inputs.
    """
    by_key: dict[tuple[str, str], list[Version]] = {}
    for version in found:
        by_key.setdefault((version.stage, version.key), []).append(version)
    # A queue: a run that names an artifact is the reason before one that needs it indirectly.
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
    kept: dict[Identity, str] = {}
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

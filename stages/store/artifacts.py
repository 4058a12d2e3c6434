"""The artifact store: content-addressed folders `artifacts/<stage>/<key>/` in fsspec storage; README.md has the others.

An artifact exists when its manifest does. Each commit has its files in a folder of its own, which the manifest names:
`<key>/` on a local disk where that is free, else `<key>.<id>/`. Whoever reads the files of before keeps them. Files
below `state/` (weights that can be replayed, optimizer moments) and `logs/` (timings) are stored and checked, but are
no part of the content that downstream keys see.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fsspec
from pydantic import TypeAdapter

from rlhf.stages.store import disk, json_schemas, readonly, transfers
from rlhf.stages.store.keys import digest, without_userinfo
from rlhf.stages.store.manifests import ArtifactError as ArtifactError
from rlhf.stages.store.manifests import is_inside, strange, with_checksum
from rlhf.tuning import multihost
from rlhf.tuning.atomic import is_partial, whole_file
from rlhf.tuning.extras import remedy
from rlhf.tuning.names import cache_folder

MANIFEST = "manifest.json"
NOT_CONTENT = ("state/", "logs/")
"""Folders of any artifact that downstream keys do not see: what can be replayed, and timings."""


IT_STAYS = "it stays where it is: the store is read-only here"


def content_digest(files: list[dict[str, Any]], parts: tuple[str, ...] = ("",)) -> str:
    """Digest of names and checksums of the files below any of `parts`, without what is not content."""
    chosen = [
        [f["path"], f["sha256"]] for f in files if f["path"].startswith(parts) and not f["path"].startswith(NOT_CONTENT)
    ]
    if not chosen:
        raise ArtifactError(f"no content below {parts}; the artifact holds {[f['path'] for f in files]}")
    return digest(sorted(chosen))


class Artifact:
    """A committed artifact: its manifest, and its files as local paths."""

    def __init__(self, store: Store, manifest: dict[str, Any]):
        self.store = store
        self.manifest = manifest

    def __repr__(self) -> str:
        return f"Artifact({self.stage}/{self.key[:12]})"

    @property
    def stage(self) -> str:
        return self.manifest["stage"]

    @property
    def key(self) -> str:
        return self.manifest["key"]

    @property
    def digest(self) -> str:
        return self.manifest["digest"]

    @property
    def metrics(self) -> dict[str, Any]:
        return self.manifest["metrics"]

    @property
    def folder(self) -> str:
        """The name of the folder of its files: the key, or that of a replacement."""
        return self.manifest.get("folder", self.key)

    @property
    def url(self) -> str:
        return self.store.address("artifacts", self.stage, self.folder)

    @property
    def path(self) -> str:
        """Its folder as the file system takes it."""
        return self.store.join("artifacts", self.stage, self.folder)

    def part_digest(self, parts: tuple[str, ...] = ("",)) -> str:
        """Digest of the files below any of `parts` (folders with their slash, or "" for all)."""
        return self.digest if parts == ("",) else content_digest(self.manifest["files"], parts)

    def has(self, part: str) -> bool:
        """Whether the artifact has a file whose path begins with `part`."""
        return any(f["path"].startswith(part) for f in self.manifest["files"])

    def local(self, part: str = "", wanted: Callable[[str], bool] = lambda path: True) -> Path:
        """A local path of the artifact or of one folder or file in it. Of a remote store the wanted files are fetched
        first; `fetch` brings others."""
        if part and not self.has(part):
            raise ArtifactError(f"{self.url} has no {part!r}; it holds {[f['path'] for f in self.manifest['files']]}")
        if self.store.is_local:
            return Path(self.store.root, "artifacts", self.stage, self.folder, part)
        self.store.fetch(self, lambda path: path.startswith(part) and wanted(path))
        return self.store.fetched(self) / part

    def fetch(self, paths: Iterable[Path]) -> None:
        """Fetches files of the artifact from a remote store to their paths below `local`."""
        if not self.store.is_local:
            names = {path.relative_to(self.store.fetched(self)).as_posix() for path in paths}
            self.store.fetch(self, names.__contains__)


class Store:
    """A root URL of any fsspec file system, and the artifacts below it."""

    def __init__(self, url: str, scratch: str | Path | None = None):
        self.url = url
        if "::" in url and "://" not in url:
            raise ArtifactError(f"the store {url}: fsspec takes :: for a chain of file systems; rename the folder")
        # Other processes write to the same store, so a cached listing is out of date.
        options = {"use_listings_cache": False} if "://" in url and not url.startswith(("file:", "local:")) else {}
        try:
            self.fs, root = fsspec.core.url_to_fs(url, **options)
        except ImportError as e:
            raise ArtifactError(f"the store {self.shown}: {remedy(url, e)}") from e
        self.is_local = "file" in (self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,))
        self.root = os.path.abspath(root) if self.is_local else root.rstrip("/")
        name = hashlib.sha256(url.encode()).hexdigest()[:12]
        self.read_only = readonly.asked() or (self.is_local and readonly.unwritable(self.root))
        own = self.is_local and not self.read_only
        self.scratch = Path(self.root) if own else Path(scratch or cache_folder("RLHF_SCRATCH", "scratch") / name)

    @property
    def shown(self) -> str:
        """The URL as messages and records have it."""
        return without_userinfo(self.url)

    def join(self, *parts: str) -> str:
        """A path below the root, as the file system takes it. Raises ArtifactError for names that leave it."""
        if parts and not is_inside(path := "/".join(parts)):
            raise ArtifactError(f"a file in {self.shown} names {path!r}, which is outside of its folder; move it away")
        return "/".join((self.root, *parts))

    def address(self, *parts: str) -> str:
        """A path below the root as messages and records have it: with the scheme of a remote store."""
        return self.join(*parts) if self.is_local else "/".join((self.shown.rstrip("/"), *parts))

    # -- reading ---------------------------------------------------------------------------

    def get(self, stage: str, key: str, repair: bool = False) -> Artifact | None:
        """Return the artifact of a key; None if it is absent or damaged (a file's size differs from the manifest).

        repair: move a damaged one to `damaged/`, if this may be written. The caller holds the lease of the key: without
        it another process may commit a whole one between the check and the move.
        """
        artifact, fault = self.examine(stage, key)
        if fault is not None and repair:
            aside = self.aside(stage, key)
            fate = f"moved to {aside}; computed again" if aside else IT_STAYS
            place = self.address("artifacts", stage, key)
            warnings.warn(f"artifact {place} is damaged ({fault}); {fate}", stacklevel=2)
        return artifact if fault is None else None

    def examine(self, stage: str, key: str) -> tuple[Artifact | None, str | None]:
        """Return the artifact of a key and what is wrong with its manifest or the sizes of its files."""
        try:
            manifest = self.read_record(json_schemas.MANIFEST, "artifacts", stage, key, MANIFEST)
        except ArtifactError as e:
            return None, str(e)
        artifact = Artifact(self, manifest) if manifest is not None else None
        return artifact, self._fault(artifact, stage, key) if artifact is not None else None

    def with_digest(self, stage: str, key: str, digest: str) -> Artifact | None:
        """Return the artifact of a key with this content, also if another one has replaced it; None if it is gone."""
        artifact = self.get(stage, key)
        if artifact is not None and artifact.digest == digest:
            return artifact
        for name in (name for name in self.names("replaced", stage) if name.startswith(f"{key}-")):
            manifest = self.read_record(json_schemas.MANIFEST, "replaced", stage, name)
            old = Artifact(self, manifest) if manifest is not None else None
            if old is not None and old.digest == digest and self._fault(old, stage, key) is None:
                return old
        return None

    def _sizes(self, folder: str) -> dict[str, int]:
        if self.is_local:
            return disk.sizes_below(Path(folder))
        return {path[len(folder) + 1 :]: i["size"] for path, i in self.fs.find(folder, detail=True).items()}

    def _fault(self, artifact: Artifact, stage: str, key: str) -> str | None:
        """What is wrong with a manifest that was found under this stage and key, or with the sizes of its files."""
        if found := strange(artifact.manifest, stage, key):
            return found
        # One listing: a request for each file would make a hit slow on an object store.
        sizes = self._sizes(artifact.path)
        for f in artifact.manifest["files"]:
            size = sizes.get(f["path"])
            # A listing may leave out for a moment what is there: the file itself is asked before it counts as damaged.
            size = self._size(f"{artifact.path}/{f['path']}") if size != f["size"] else size
            if size is None:
                return f"{f['path']} is missing"
            if size != f["size"]:
                return f"{f['path']} has {size} bytes, the manifest says {f['size']}"
        return None

    def _size(self, path: str) -> int | None:
        """The size of a file; None where there is none."""
        try:
            return self.fs.info(path)["size"]  # type: ignore[no-any-return]
        except FileNotFoundError:
            return None

    def verify(self, artifact: Artifact) -> str | None:
        """None when every checksum holds, else what is wrong."""
        if fault := self._fault(artifact, artifact.stage, artifact.key):
            return fault

        def differs(f: dict[str, Any]) -> str | None:
            try:
                with self.fs.open(f"{artifact.path}/{f['path']}", "rb") as data:
                    checksum = hashlib.file_digest(data, "sha256").hexdigest()
            except FileNotFoundError:
                return f"{f['path']} is missing"
            same = checksum == f["sha256"]
            return None if same else f"{f['path']} has checksum {checksum[:12]}, the manifest says {f['sha256'][:12]}"

        return next(filter(None, transfers.each(differs, artifact.manifest["files"])), None)

    def ensure_whole(self, artifact: Artifact) -> None:
        """Raises ArtifactError if a disk has changed bytes of an artifact. Those of a remote store are compared as they
        arrive."""
        if self.is_local and (fault := self.verify(artifact)):
            raise ArtifactError(
                f"{artifact.url} is damaged ({fault}): the command that made it makes it again, or restore it from a "
                "backup"
            )

    def aside(self, stage: str, key: str) -> str | None:
        """As `set_aside`; None where the store may not be written to, and the artifact stays."""
        return None if self.read_only else readonly.unless_refused(lambda: self.set_aside(stage, key))

    def set_aside(self, stage: str, key: str) -> str:
        """Moves an artifact out of the way (never deletes it) and returns where to."""
        readonly.refuse(self.shown)
        place = self.join("artifacts", stage, key)
        aside = ("damaged", stage, f"{key[:16]}-{uuid.uuid4().hex[:6]}")
        target = self.join(*aside)
        folder = place
        with contextlib.suppress(ArtifactError):
            manifest = self.read_record(json_schemas.MANIFEST, "artifacts", stage, key, MANIFEST)
            if manifest is not None and not strange(manifest, stage, key):
                folder = self.join("artifacts", stage, manifest.get("folder", key))
        # The manifest goes first: without it nothing reads the half-moved folder as whole.
        moves = {f"{place}/{MANIFEST}": f"{target}/{MANIFEST}"}
        moves |= {path: target + path[len(folder) :] for path in self.fs.find(folder)}
        transfers.move(self, moves)
        if self.is_local:
            shutil.rmtree(folder, ignore_errors=True)
        return self.address(*aside)

    def all_keys(self) -> list[tuple[str, str]]:
        """(stage, key) of everything in the store that has a manifest."""
        keys = [(stage, key) for stage in self.names("artifacts") for key in self.names("artifacts", stage)]
        return [(stage, key) for stage, key in keys if self.exists("artifacts", stage, key, MANIFEST)]

    def exists(self, *parts: str) -> bool:
        """Whether there is a file or folder. Raises the error of a store that does not answer: `fs.exists` says no."""
        try:
            self.fs.info(self.join(*parts))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def names(self, *parts: str) -> list[str]:
        """Sorted names of the files and folders in a folder, but for half-written ones; none without the folder."""
        # Not by glob, which would take a `[` in the root for a pattern. On an object store a name may be `..`.
        try:
            paths = self.fs.ls(self.join(*parts), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = (path.rstrip("/").rsplit("/", 1)[1] for path in paths)
        return sorted(name for name in names if is_inside(name) and not is_partial(Path(name)))

    def fetched(self, artifact: Artifact) -> Path:
        """The local folder to which `fetch` brings files of an artifact."""
        # By content, not by key alone: a stage that was forced has other bytes under the same key.
        content = digest([[f["path"], f["sha256"]] for f in artifact.manifest["files"]])[:12]
        return self.scratch / "fetched" / artifact.stage / f"{artifact.key}-{content}"

    def fetch(self, artifact: Artifact, wanted: Callable[[str], bool]) -> None:
        """Downloads the files with wanted paths that are not here whole; raises ArtifactError for a damaged one."""
        transfers.bring(self, artifact, self.fetched(artifact), wanted)

    # -- writing ---------------------------------------------------------------------------

    def commit(
        self,
        folder: Path,
        manifest: dict[str, Any],
        replace: bool = False,
        files: list[dict[str, Any]] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Artifact:
        """Makes the files of `folder` the artifact `manifest["stage"]/manifest["key"]`; the manifest is written last.

        `folder` is consumed. An artifact that the key already has stays. With `replace` the new files are written
        beside it, and the one step that makes them the artifact is the write of the manifest: at each moment there is
        one of the two, and the old one's files stay where its readers have them.

        Every process of a group calls this with its own folder; process 0 writes the manifest when all files are there.

        files: `transfers.files_of(folder)`, from a caller that has it. check: called before the files are written and
        again before the manifest is; raises where somebody else makes this artifact by now.
        """
        readonly.refuse(self.shown)
        stage, key = manifest["stage"], manifest["key"]
        files = transfers.files_of(folder) if files is None else files
        made = manifest | {
            "files": files,
            "digest": content_digest(files),
            "committed": datetime.datetime.now(datetime.UTC).isoformat(),
        }
        check()

        def existing() -> dict[str, Any] | None:
            found = self.get(stage, key, repair=True)
            if found is not None and replace:
                self._keep_manifest(found)
            return None if found is None or replace else found.manifest

        def written() -> dict[str, Any]:
            whole = with_checksum(made | {"folder": name})
            check()
            self.write_json(whole, "artifacts", stage, key, MANIFEST)
            return whole

        kept: dict[str, Any] | None = multihost.from_primary(existing)
        if kept is None:
            name = transfers.place(self, folder, stage, key)
            kept = multihost.from_primary(written)
        shutil.rmtree(folder, ignore_errors=True)
        return Artifact(self, kept)

    def remove(self, path: str) -> None:
        """Removes one file. Raises FileNotFoundError, where the file system does, if there is none."""
        readonly.refuse(self.shown)
        # `fs.rm` would take a `[` or `*` in the root for a pattern, and remove the files of other stores.
        self.fs.rm_file(path)

    def remove_folder(self, path: str) -> None:
        """Removes a folder with all that is in it."""
        readonly.refuse(self.shown)
        found = self.fs.find(path, withdirs=True, detail=True)
        # What is deepest goes first: a folder must be empty.
        for place in sorted(found, reverse=True):
            if found[place]["type"] == "file":
                self.fs.rm_file(place)
            else:
                self._remove_empty(place)
        self._remove_empty(path)

    def _remove_empty(self, folder: str) -> None:
        # An object store has no folders: they go with the last object in them.
        with contextlib.suppress(OSError, NotImplementedError, ValueError):
            self.fs.rmdir(folder)

    def _keep_manifest(self, old: Artifact) -> None:
        """Leaves the manifest of an artifact that is about to be replaced in `replaced/`, to find its files by."""
        name = f"{old.key}-{digest([old.folder, old.manifest['committed']])[:8]}.json"
        self.write_json(old.manifest, "replaced", old.stage, name)

    def read_bytes(self, *parts: str) -> bytes | None:
        """Return a file's content; None if there is none: a second look could see the file of another process."""
        try:
            return self.fs.cat_file(self.join(*parts))  # type: ignore[no-any-return]
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_json(self, *parts: str) -> Any | None:
        """Return the JSON value of a file; None if there is no file, or it holds `null`."""
        data = self.read_bytes(*parts)
        return None if data is None else self._value(data, parts)

    def _value(self, data: bytes, parts: tuple[str, ...]) -> Any:
        try:
            return json.loads(data)
        except ValueError as e:
            raise ArtifactError(f"{self.address(*parts)} is not JSON ({e}); move it away and run again") from e

    def read_record(self, form: TypeAdapter[Any], *parts: str) -> dict[str, Any] | None:
        """As `read_json`, of one of `forms`. Raises ArtifactError, which names the file, where it has another form."""
        data = self.read_bytes(*parts)
        if data is None:
            return None
        value = self._value(data, parts)
        if fault := json_schemas.misfit(value, form):
            raise ArtifactError(f"{self.address(*parts)} has another form ({fault}); move it away and run again")
        return value  # type: ignore[no-any-return]

    def write_json(self, value: Any, *parts: str) -> None:
        """As `write_bytes`, with a JSON value."""
        self.write_bytes(json.dumps(value, indent=1, ensure_ascii=False).encode(), *parts)

    def write_bytes(self, data: bytes, *parts: str) -> None:
        """Writes a file in one atomic step, synced to disk where the store is local."""
        readonly.refuse(self.shown)
        path = self.join(*parts)
        if not self.is_local:  # an object store shows an object only when it is complete
            self.fs.pipe_file(path, data)
            return
        with whole_file(Path(path)) as partial, partial.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        disk.sync_folders([Path(path).parent])

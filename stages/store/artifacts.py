"""The artifact store: content-addressed folders `artifacts/<stage>/<key>/` in fsspec storage (`README.md`).

An artifact exists when its manifest does. Each commit has its files in its own folder, which the manifest names:
`<key>/` on a local disk if that is free, else `<key>.<id>/`. Readers of a replaced artifact keep its files. Files below
`state/` (weights that can be replayed, optimizer moments) and `logs/` (timings) are stored and checked, but downstream
keys do not contain them.
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
from collections.abc import Callable, Iterable, Mapping
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
"""Folders of an artifact that downstream keys ignore."""

BUCKETS = {"s3", "gs", "abfs"}
"""Protocols of file systems whose URLs begin with a bucket."""
IT_STAYS = "it stays where it is: the store is read-only here"


def content_digest(files: list[dict[str, Any]], parts: tuple[str, ...] = ("",)) -> str:
    """Return the digest of names and checksums of the content files below any of `parts`."""
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
        """The name of the folder of its files."""
        return self.manifest.get("folder", self.key)

    @property
    def url(self) -> str:
        return self.store.address("artifacts", self.stage, self.folder)

    @property
    def path(self) -> str:
        """Its folder as a path of the file system."""
        return self.store.join("artifacts", self.stage, self.folder)

    def part_digest(self, parts: tuple[str, ...] = ("",)) -> str:
        """Return the digest of the files below any of `parts` (folders with their slash, or "" for all)."""
        return self.digest if parts == ("",) else content_digest(self.manifest["files"], parts)

    def has(self, part: str) -> bool:
        """Whether the artifact has a file whose path begins with `part`."""
        return any(f["path"].startswith(part) for f in self.manifest["files"])

    def local(self, part: str = "", wanted: Callable[[str], bool] = lambda path: True) -> Path:
        """Return the local path of the artifact, or of one folder or file in it.

        Of a remote store it first downloads the files with wanted paths; `fetch` downloads others.
        """
        if part and not self.has(part):
            raise ArtifactError(f"{self.url} has no {part!r}; it holds {[f['path'] for f in self.manifest['files']]}")
        if self.store.is_local:
            return Path(self.path, part)
        self._download(lambda path: path.startswith(part) and wanted(path))
        return self.downloads / part

    def fetch(self, paths: Iterable[Path]) -> None:
        """Download files of the artifact from a remote store to their paths below `local`."""
        if not self.store.is_local:
            self._download({path.relative_to(self.downloads).as_posix() for path in paths}.__contains__)

    def _download(self, wanted: Callable[[str], bool]) -> None:
        """Download the wanted files that are not here whole, several at a time. A file gets its name when complete."""

        def one(f: dict[str, Any]) -> None:
            target = folder / f["path"]
            if disk.is_whole(target, f["sha256"]):
                return
            with whole_file(target) as partial:
                if not disk.fetched(self.store.fs, f"{self.path}/{f['path']}", partial, f["sha256"]):
                    raise ArtifactError(f"{self.url}/{f['path']} differs from its checksum; run `rlhf verify`")
            disk.note_whole(target, f["sha256"])

        folder = self.downloads
        files = [f for f in self.manifest["files"] if wanted(f["path"])]
        folder.mkdir(parents=True, exist_ok=True)
        # The time of its last use; another user's folder may be read only.
        with contextlib.suppress(OSError):
            os.utime(folder)
        missing = (f["size"] for f in files if not (folder / f["path"]).exists())
        disk.make_room(folder.parents[1], sum(missing))
        transfers.each(one, files)

    @property
    def downloads(self) -> Path:
        """The local folder of files from a remote store."""
        # By content, not by key alone: a stage that was forced has other bytes under the same key.
        content = digest([[f["path"], f["sha256"]] for f in self.manifest["files"]])[:12]
        return self.store.scratch / "fetched" / self.stage / f"{self.key}-{content}"


class Store:
    """The artifacts and records below a root URL of any fsspec file system."""

    def __init__(self, url: str, scratch: str | Path | None = None):
        self.url = url
        if not set(url.split("::")[:-1]) <= set(fsspec.available_protocols()):
            raise ArtifactError(f"the store {self.shown}: to fsspec :: is a chain of file systems; rename the folder")
        # Other processes write to the same store, so a cached listing would be out of date.
        options = {"use_listings_cache": False} if "://" in url and not url.startswith(("file:", "local:")) else {}
        try:
            self.fs, root = fsspec.core.url_to_fs(url, **options)
        except ImportError as e:
            raise ArtifactError(f"the store {self.shown}: {remedy(url, e)}") from e
        if url.rpartition("::")[2].startswith(("http:", "https:")):
            raise ArtifactError(
                f"the store {self.shown}: HTTP has no way to write or list; say a folder, s3:// or gs://"
            )
        if {self.fs.protocol, *self.fs.protocol} & BUCKETS and "@" in root.partition("/")[0]:
            raise ArtifactError(
                f"the store {self.shown}: the keys of a bucket come from the environment, such as AWS_ACCESS_KEY_ID or "
                "GOOGLE_APPLICATION_CREDENTIALS, and not from its URL"
            )
        self.is_local = transfers.is_local(self.fs)
        self.root = os.path.abspath(root) if self.is_local else root.rstrip("/")
        name = hashlib.sha256(url.encode()).hexdigest()[:12]
        self.read_only = readonly.asked() or (self.is_local and readonly.unwritable(self.root))
        own = self.is_local and not self.read_only
        self.scratch = Path(self.root) if own else Path(scratch or cache_folder("RLHF_SCRATCH", "scratch") / name)

    @property
    def shown(self) -> str:
        """The URL without secrets, for messages and records."""
        return without_userinfo(self.url)

    def join(self, *parts: str) -> str:
        """Return a path below the root for the file system; raise ArtifactError for names that leave it."""
        if parts and not is_inside(path := "/".join(parts)):
            raise ArtifactError(f"a file in {self.shown} names {path!r}, which is outside of its folder; move it away")
        return "/".join((self.root, *parts))

    def address(self, *parts: str) -> str:
        """Return a path below the root for messages and records, with the scheme of a remote store."""
        return self.join(*parts) if self.is_local else "/".join((self.shown.rstrip("/"), *parts))

    # -- reading ---------------------------------------------------------------------------

    def get(self, stage: str, key: str, repair: bool = False) -> Artifact | None:
        """Return the artifact of a key; None if it is absent or damaged (a file's size differs from the manifest).

        repair: move a damaged one to `damaged/`. The caller holds the lease of the key; without it another process may
        commit a whole one between the check and the move.
        """
        artifact, fault = self.examine(stage, key)
        if fault is not None and repair:
            place, aside = self.address("artifacts", stage, key), self.set_aside(stage, key)
            warnings.warn(f"artifact {place} is damaged ({fault}); moved to {aside}; it is recomputed", stacklevel=2)
        return artifact if fault is None else None

    def examine(self, stage: str, key: str) -> tuple[Artifact | None, str | None]:
        """Return the artifact of a key, and a fault of its manifest or of the sizes of its files."""
        try:
            manifest = self.read_record(json_schemas.MANIFEST, "artifacts", stage, key, MANIFEST)
        except ArtifactError as e:
            return None, str(e)
        artifact = Artifact(self, manifest) if manifest is not None else None
        return artifact, self._fault(artifact, stage, key) if artifact is not None else None

    def with_digest(self, stage: str, key: str, digest: str) -> Artifact | None:
        """Return the artifact of a key with this content, also a replaced one; None if it is gone."""
        artifact = self.get(stage, key)
        if artifact is not None and artifact.digest == digest:
            return artifact
        for name in (name for name in self.names("replaced", stage) if name.startswith(f"{key}-")):
            manifest = self.read_record(json_schemas.MANIFEST, "replaced", stage, name)
            old = Artifact(self, manifest) if manifest is not None else None
            if old is not None and old.digest == digest and self._fault(old, stage, key) is None:
                return old
        return None

    def _fault(self, artifact: Artifact, stage: str, key: str) -> str | None:
        """Return a fault of a manifest that was found under this stage and key, or of the sizes of its files."""
        if fault := strange(artifact.manifest, stage, key):
            return fault
        folder = artifact.path
        # One listing: a request for each file would make a hit slow on an object store.
        if self.is_local:
            sizes = disk.sizes_below(Path(folder))
        else:
            sizes = {path[len(folder) + 1 :]: i["size"] for path, i in self.fs.find(folder, detail=True).items()}
        for f in artifact.manifest["files"]:
            size = sizes.get(f["path"])
            # A listing may omit an existing file for a moment, so the file itself decides.
            size = self._size(f"{folder}/{f['path']}") if size != f["size"] else size
            if size is None:
                return f"{f['path']} is missing"
            if size != f["size"]:
                return f"{f['path']} has {size} bytes, the manifest says {f['size']}"
        return None

    def _size(self, path: str) -> int | None:
        """Return the size of a file; None if there is none."""
        try:
            return self.fs.info(path)["size"]  # type: ignore[no-any-return]
        except FileNotFoundError:
            return None

    def verify(self, artifact: Artifact) -> str | None:
        """Return None if every checksum is right, else the fault."""
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
        """Raise ArtifactError if a disk has changed bytes of an artifact; a remote store's are checked at download."""
        if self.is_local and (fault := self.verify(artifact)):
            raise ArtifactError(
                f"{artifact.url} is damaged ({fault}): repeat the command that made it, or restore a backup"
            )

    def set_aside(self, stage: str, key: str) -> str:
        """Move an artifact to `damaged/` (never delete it), and return its new address."""
        readonly.refuse(self)
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
        self._move(moves)
        if self.is_local:
            shutil.rmtree(folder, ignore_errors=True)
        return self.address(*aside)

    def _move(self, moves: Mapping[str, str]) -> None:
        """Move files in this order; skip a file that another process has moved."""
        for path, target in moves.items():
            self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                if self.is_local:
                    os.replace(path, target)
                else:
                    # To `fs.mv` a `[` or `*` is a pattern.
                    self.fs.cp_file(path, target)
                    self.fs.rm_file(path)

    def all_keys(self) -> list[tuple[str, str]]:
        """Return (stage, key) of all artifacts of the store."""
        keys = [(stage, key) for stage in self.names("artifacts") for key in self.names("artifacts", stage)]
        return [(stage, key) for stage, key in keys if self.exists("artifacts", stage, key, MANIFEST)]

    def exists(self, *parts: str) -> bool:
        """Whether there is a file or folder. Raise the error of a store that does not answer, unlike `fs.exists`."""
        try:
            self.fs.info(self.join(*parts))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def names(self, *parts: str) -> list[str]:
        """Return the sorted names in a folder without half-written files; none if there is no folder."""
        # Not by glob, to which a `[` in the root is a pattern. On an object store a name may be `..`.
        try:
            paths = self.fs.ls(self.join(*parts), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = (path.rstrip("/").rsplit("/", 1)[1] for path in paths)
        return sorted(name for name in names if is_inside(name) and not is_partial(Path(name)))

    # -- writing ---------------------------------------------------------------------------

    def commit(
        self,
        folder: Path,
        manifest: dict[str, Any],
        replace: bool = False,
        files: list[dict[str, Any]] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Artifact:
        """Make the files of `folder` the artifact `manifest["stage"]/manifest["key"]`; write the manifest last.

        `folder` is consumed. An existing artifact of the key stays. With `replace` the new files go to another folder,
        and the write of the manifest makes them the artifact in one step: at each moment there is one of the two, and
        readers of the old one keep its files.

        Every process of a group calls this with its own folder; process 0 writes the manifest after all files.

        files: `transfers.files_of(folder)`, if the caller has it. check: called before the files are written and before
        the manifest is; raises if another process makes this artifact.
        """
        readonly.refuse(self)
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
                name = f"{key}-{digest([found.folder, found.manifest['committed']])[:8]}.json"
                self.write_json(found.manifest, "replaced", stage, name)
            return None if found is None or replace else found.manifest

        def written() -> dict[str, Any]:
            whole = with_checksum(made | {"folder": name})
            check()
            self.write_json(whole, "artifacts", stage, key, MANIFEST)
            return whole

        kept: dict[str, Any] | None = multihost.from_primary(existing)
        if kept is None:
            name = self._place(folder, stage, key)
            kept = multihost.from_primary(written)
        shutil.rmtree(folder, ignore_errors=True)
        return Artifact(self, kept)

    def _place(self, folder: Path, stage: str, key: str) -> str:
        """Upload the files of the group's folders into a new folder of the store; return its name.

        Two commits of one key have separate folders, and neither contains files of a killed commit.
        """
        parent = Path(self.join("artifacts", stage))

        def renamed() -> str:
            name = f"{key}.{uuid.uuid4().hex[:8]}"
            if self.is_local:
                # Before the rename: after a loss of power a manifest must not be there without them.
                disk.shared_and_synced(folder)
                parent.mkdir(parents=True, exist_ok=True)
                try:
                    # Fails if the folder has files already.
                    os.rename(folder, parent / key)
                    name = key
                except OSError:
                    os.rename(folder, parent / name)
                disk.sync_folders(p for p in (parent, *parent.parents) if p.is_relative_to(self.root))
            return name

        name: str = multihost.from_primary(renamed)
        if not self.is_local or not multihost.is_primary():
            if self.is_local:
                disk.shared_and_synced(folder)
            transfers.send(self.fs, folder, self.join("artifacts", stage, name))
        multihost.barrier()
        return name

    def remove(self, path: str) -> None:
        """Remove one file; raise FileNotFoundError if there is none and the file system reports that."""
        readonly.refuse(self)
        # To `fs.rm` a `[` or `*` in the root is a pattern, which may match files of other stores.
        self.fs.rm_file(path)

    def remove_folder(self, path: str) -> None:
        """Remove a folder with its content."""
        readonly.refuse(self)
        found = self.fs.find(path, withdirs=True, detail=True)
        # The deepest first: a folder must be empty.
        for place in [*sorted(found, reverse=True), path]:
            if place in found and found[place]["type"] == "file":
                self.fs.rm_file(place)
            else:
                # An object store has no folders.
                with contextlib.suppress(OSError, NotImplementedError, ValueError):
                    self.fs.rmdir(place)

    def read_bytes(self, *parts: str) -> bytes | None:
        """Return a file's content; None if there is none."""
        try:
            return self.cat(self.join(*parts))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def cat(self, path: str) -> bytes:
        """Return the content of a path of the file system in one request: a second one could see another file."""
        # s3fs asks for the size first, to read a large file in parts.
        options = {"max_concurrency": 1} if "s3" in self.fs.protocol else {}
        return bytes(self.fs.cat_file(path, **options))

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
        """As `read_json`, for a value of this form; raise ArtifactError, which names the file, for another form."""
        data = self.read_bytes(*parts)
        if data is None:
            return None
        value = self._value(data, parts)
        if fault := json_schemas.misfit(value, form):
            raise ArtifactError(f"{self.address(*parts)} has another form ({fault}); move it away and run again")
        return value  # type: ignore[no-any-return]

    def write_json(self, value: Any, *parts: str) -> None:
        """Write a JSON value as `write_bytes` does."""
        self.write_bytes(json.dumps(value, indent=1, ensure_ascii=False).encode(), *parts)

    def write_bytes(self, data: bytes, *parts: str) -> None:
        """Write a file in one atomic step, synced to disk in a local store."""
        readonly.refuse(self)
        path = self.join(*parts)
        if self.is_local:
            disk.write_synced(Path(path), data)
        else:  # an object store shows an object only when it is complete
            self.fs.pipe_file(path, data)

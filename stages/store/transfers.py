"""Files on their way between this process and a store: several at a time, and those of a group joined to one folder."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf.stages.store import disk
from rlhf.stages.store.manifests import ArtifactError
from rlhf.tuning import multihost
from rlhf.tuning.atomic import is_partial, whole_file

if TYPE_CHECKING:
    from rlhf.stages.store.artifacts import Artifact, Store

AT_ONCE = 16
"""Files that are read, hashed or transferred at a time."""
T = TypeVar("T")
R = TypeVar("R")


def each(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return the results of `work` in the order of the items, computed in threads; raise the first error."""
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="transfer") as threads:
        return list(threads.map(work, items))


def checksums(folder: Path, paths: Sequence[Path]) -> dict[str, str]:
    """Return SHA-256 (hex) of files by their paths in the folder."""
    sums = each(disk.sha256_file, paths)
    return {path.relative_to(folder).as_posix(): found for path, found in zip(paths, sums, strict=True)}


def joined(folder: Path, files: dict[str, T], channel: str) -> dict[str, T]:
    """Return the entries by name of all processes of the group.

    Of files with one name the process with the lowest number keeps its own; the others remove theirs.
    """
    parts = multihost.gather(files, channel)
    for name in {name for part in parts[: multihost.process_index()] for name in part} & files.keys():
        (folder / name).unlink()
    return {name: found for part in reversed(parts) for name, found in part.items()}


def files_of(folder: Path) -> list[dict[str, Any]]:
    """Return path, size and checksum of each file in the folders of all processes of the group, for a manifest.

    Every process calls this; see `joined` for files of one name.
    """
    sums = checksums(folder, sorted(p for p in folder.rglob("*") if p.is_file()))
    files = {n: {"path": n, "size": (folder / n).stat().st_size, "sha256": s} for n, s in sums.items()}
    return [found for _, found in sorted(joined(folder, files, "main").items())]


def send(store: Store, folder: Path, target: str) -> None:
    """Upload the files of a folder into one of the store, which other processes may share.

    In a local store they are moved, and synced to the disk.
    """
    paths = [path for path in folder.rglob("*") if path.is_file() and not is_partial(path)]
    names = [path.relative_to(folder).as_posix() for path in paths]
    for parent in sorted({f"{target}/{name}".rpartition("/")[0] for name in names}):
        store.fs.makedirs(parent, exist_ok=True)

    def one(name: str) -> None:
        if store.is_local:
            disk.sync_file(folder / name)
            os.replace(folder / name, f"{target}/{name}")
        else:
            store.fs.put_file(str(folder / name), f"{target}/{name}")

    each(one, names)
    if store.is_local:
        disk.sync_folders(Path(target, name).parent for name in names)


def bring(artifact: Artifact, wanted: Callable[[str], bool]) -> None:
    """Download the wanted files of an artifact that are not here whole, several at a time.

    A file gets its name when it is complete. Raise ArtifactError for one that differs from its checksum in the store.
    """

    folder = artifact.downloads

    def one(f: dict[str, Any]) -> None:
        target = folder / f["path"]
        if disk.is_whole(target, f["sha256"]):
            return
        with whole_file(target) as partial:
            if not disk.fetched(artifact.store.fs, f"{artifact.path}/{f['path']}", partial, f["sha256"]):
                raise ArtifactError(f"{artifact.url}/{f['path']} differs from its checksum; run `rlhf verify`")
        disk.note_whole(target, f["sha256"])

    each(one, [f for f in artifact.manifest["files"] if wanted(f["path"])])


def move(store: Store, moves: Mapping[str, str]) -> None:
    """Move files of a store in this order; skip a file that another process has moved."""
    for path, target in moves.items():
        store.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if store.is_local:
                os.replace(path, target)
            else:
                # To `fs.mv` a `[` or `*` is a pattern.
                store.fs.cp_file(path, target)
                store.fs.rm_file(path)


def place(store: Store, folder: Path, stage: str, key: str) -> str:
    """Upload the files of the group's folders into a new folder of the store; return its name.

    Two commits of one key have separate folders, and neither contains files of a killed commit.
    """
    parent = Path(store.join("artifacts", stage))

    def renamed() -> str:
        name = f"{key}.{uuid.uuid4().hex[:8]}"
        if store.is_local:
            # Before the rename: after a loss of power a manifest must not be there without them.
            disk.shared_and_synced(folder)
            parent.mkdir(parents=True, exist_ok=True)
            try:
                # Fails if the folder has files already.
                os.rename(folder, parent / key)
                name = key
            except OSError:
                os.rename(folder, parent / name)
            disk.sync_folders(p for p in (parent, *parent.parents) if p.is_relative_to(store.root))
        return name

    name: str = multihost.from_primary(renamed)
    if not store.is_local or not multihost.is_primary():
        if store.is_local:
            disk.shared_and_synced(folder)
        send(store, folder, store.join("artifacts", stage, name))
    multihost.barrier()
    return name

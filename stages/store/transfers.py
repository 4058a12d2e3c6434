"""Files on their way between this process and a store: several at a time, and those of a group joined to one folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from fsspec import AbstractFileSystem

from rlhf.stages.store import disk
from rlhf.tuning import multihost
from rlhf.tuning.atomic import is_partial
from rlhf.tuning.errors import with_causes

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


def is_unreachable(error: BaseException) -> bool:
    """Whether a client of an object store has lost its connection. Each has its own errors, with such a cause."""
    return any(
        isinstance(cause, ConnectionError | TimeoutError) or type(cause).__module__.startswith("aiohttp")
        for cause in with_causes(error)
    )


def is_local(fs: AbstractFileSystem) -> bool:
    """Whether a file system is this machine's."""
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def send(fs: AbstractFileSystem, folder: Path, target: str) -> None:
    """Upload the files of a folder into a folder of a store, which other processes may share.

    On a local file system they are moved, and synced to the disk.
    """
    paths = [path for path in folder.rglob("*") if path.is_file() and not is_partial(path)]
    names = [path.relative_to(folder).as_posix() for path in paths]
    for parent in sorted({f"{target}/{name}".rpartition("/")[0] for name in names}):
        fs.makedirs(parent, exist_ok=True)

    def one(name: str) -> None:
        if is_local(fs):
            disk.sync_file(folder / name)
            os.replace(folder / name, f"{target}/{name}")
        else:
            fs.put_file(str(folder / name), f"{target}/{name}")

    each(one, names)
    if is_local(fs):
        disk.sync_folders(Path(target, name).parent for name in names)

"""Files of a local disk: sizes and checksums, errors of listings, and what outlives a loss of power."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def sizes_below(folder: Path) -> dict[str, int]:
    """The size of each file below a folder, by its path in it; none where there is no such folder.

    Raises OSError where a folder cannot be listed: what a disk does not show for a moment is not gone.
    """
    sizes: dict[str, int] = {}

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for parent, _, names in os.walk(folder, onerror=fail):
        for name in names:
            path = Path(parent, name)
            # A half-written file gets its name after the listing.
            with contextlib.suppress(FileNotFoundError):
                sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    return sizes


def sync_file(path: Path) -> None:
    """Has a file's data on the disk when it returns."""
    with path.open("rb") as f:
        os.fsync(f.fileno())


def sync_folders(folders: Iterable[Path]) -> None:
    """Has the names in these folders on the disk when it returns; systems that open no folders are left alone."""
    for folder in sorted(set(folders)):
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:
            continue
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def shared_and_synced(folder: Path) -> None:
    """Makes what is below a folder as readable as the umask lets it, and has all of it on the disk when it returns."""
    # Some libraries make files that their owner alone may read; a store is shared as far as umask says.
    folders = [folder]
    for path in folder.rglob("*"):
        if path.is_dir():
            folders.append(path)
        else:
            path.chmod(0o666 & ~umask())
            sync_file(path)
    for path in folders:
        path.chmod(0o777 & ~umask())
    sync_folders(folders)


def sha256_file(path: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def files_of(folder: Path) -> list[dict[str, Any]]:
    """Path, size and checksum of each file of a folder, as a manifest has them."""
    return [
        {"path": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(p for p in folder.rglob("*") if p.is_file())
    ]


@functools.cache
def umask() -> int:
    """The bits that this process takes from the modes of new files."""
    # It can only be asked for by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask

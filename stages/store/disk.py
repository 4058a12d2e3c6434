"""Files of a local disk: sizes, checksums, durable writes, and disks that are full or fail."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rlhf.tuning.atomic import is_partial, whole_file
from rlhf.tuning.errors import with_causes

FETCHES = 3
"""Downloads of a file that arrives with another checksum."""


def sizes_below(folder: Path) -> dict[str, int]:
    """Return the size of each file below a folder, by its path in it; empty if there is no such folder.

    Raise OSError if a folder cannot be listed: a file is not missing because a disk fails for a moment.
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
    """Write a file's data to the disk (fsync)."""
    with path.open("rb") as f:
        os.fsync(f.fileno())


def sync_folders(folders: Iterable[Path]) -> None:
    """Write the names in these folders to the disk (fsync), on systems that can open folders."""
    for folder in sorted(set(folders)):
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:
            continue
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file in one atomic step, synced to the disk."""
    with whole_file(path) as partial, partial.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    sync_folders([path.parent])


def shared_and_synced(folder: Path) -> None:
    """Write all files below a folder to the disk (fsync), with the modes that the umask allows."""
    # Some libraries make files that only their owner may read; a store is as shared as the umask says.
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
    """Return SHA-256 (hex) of a file's content."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


Mark = tuple[int, int, int, int]
"""Times of change of a file's content and of its inode, its size, and the inode."""


def mark_of(path: str | Path) -> Mark:
    """Return the present mark of a file; raise OSError if there is none."""
    stat = os.stat(path)
    # Not the time of change alone: tools that copy files set it back.
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino


_whole: dict[tuple[Path, str], Mark] = {}
"""The mark of each file that this process has checked, by its path and checksum."""


def is_whole(path: Path, sha256: str) -> bool:
    """Whether a file has this checksum; it is read once in a process, and again if its mark changes."""
    if not path.exists():
        return False
    mark = mark_of(path)
    if _whole.get((path, sha256)) != mark:
        if sha256_file(path) != sha256:
            return False
        _whole[path, sha256] = mark
    return True


def note_whole(path: Path, sha256: str) -> None:
    """Note that a file has this checksum."""
    _whole[path, sha256] = mark_of(path)


def fetched(fs: Any, source: str, target: Path, sha256: str) -> bool:
    """Download a file of a file system, again if it arrives damaged; return whether it has this checksum."""
    for _ in range(FETCHES):
        fs.get_file(source, str(target))
        if sha256_file(target) == sha256:
            return True
    return False


@functools.cache
def umask() -> int:
    """Return the bits that this process removes from the modes of new files."""
    # The system returns it only when it is set.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


FULL = (errno.ENOSPC, errno.EDQUOT)
FAULTS = (*FULL, errno.EIO, errno.ESTALE)
_TEXTS = {number: re.compile(rf"{re.escape(os.strerror(number))}( [(\[]os.error.*)?$") for number in FULL}
"""The ends of errors of safetensors and tensorstore, which write files and raise no OSError."""
UNUSED_SECONDS = 3600.0
"""Time after the last use of a download, as a stage may read its files later than it asks for them."""
AGAIN = "and run the same command again: it continues with the finished parts"


class DiskFault(OSError):
    """A disk is full or fails; the message names the place and the remedy."""


def disk_fault(error: BaseException, folder: Path) -> DiskFault | None:
    """Return the fault of a disk of this machine that has caused an error, with a remedy; None if there is none.

    folder: where most is written, if the error names no file.
    """
    for cause in with_causes(error, suppressed=True):
        if isinstance(cause, DiskFault):
            return cause
        number, name = getattr(cause, "errno", 0), getattr(cause, "filename", None)
        place = Path(os.fsdecode(name)) if isinstance(name, str | bytes) else None
        # Clients of services also raise EIO, without the name of a file. A URL names a file of a service.
        known = FULL if place is None else FAULTS
        is_fault = isinstance(cause, OSError) and number in known and "://" not in str(name)
        if type(cause) in (RuntimeError, ValueError, SafetensorError) and "://" not in str(cause):
            number = next((n for n, text in _TEXTS.items() if text.search(str(cause))), 0)
            is_fault = number in FULL
        if is_fault:
            place = place or folder
            remedy = _room(place) if number in FULL else f"{place} failed. Check its disk, {AGAIN}"
            return DiskFault(number, f"{os.strerror(number)}: {remedy}")
    return None


def check_room(folder: Path, size: int) -> None:
    """Raise DiskFault if the disk of a folder has no room for `size` more bytes."""
    free = shutil.disk_usage(_existing(folder)).free
    if free < size:
        full = os.strerror(errno.ENOSPC)
        raise DiskFault(errno.ENOSPC, f"{full}: at least {size / 1e9:.1f} GB will be written; {_room(folder)}")


def make_room(downloads: Path, size: int) -> None:
    """Remove downloads (two levels below a folder) until the disk has room for `size` more bytes.

    The least recently used ones go first; those that were used in the last `UNUSED_SECONDS` stay.
    """
    if not downloads.is_dir() or shutil.disk_usage(downloads).free >= size:
        return
    for path in sorted(downloads.glob("*/*"), key=_last_used):
        # Other processes begin to use some.
        if _last_used(path) < time.time() - UNUSED_SECONDS and shutil.disk_usage(downloads).free < size:
            # Others are another user's.
            with contextlib.suppress(PermissionError):
                remove_whole(path)


def _last_used(path: Path) -> float:
    """Return the time of the newest file of a folder, which may be written now, or of the folder itself."""
    times = [0.0]
    # Another process may remove it meanwhile.
    with contextlib.suppress(FileNotFoundError):
        for one in (path, *path.rglob("*")):
            times.append(one.stat().st_mtime)
    return max(times)


def remove_whole(path: Path) -> None:
    """Remove a folder: a kill in between leaves no part of it under its name."""
    aside = path if is_partial(path) else path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    # Another process removes it too.
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _room(place: Path) -> str:
    usage = shutil.disk_usage(_existing(place))
    room = f"{usage.free / 1e6:,.0f} MB left of {usage.total / 1e6:,.0f}"
    return (
        f"the disk of {place} has {room}. Make room there (`rlhf gc` with the run's --store lists what it can "
        "delete; if it has no room for its own small files, delete the log of an old run, runs/NAME/worker.log), "
        f"{AGAIN}"
    )


def _existing(place: Path) -> Path:
    """Return the nearest existing folder above."""
    return next((p for p in (place, *place.absolute().parents) if p.exists()), Path("/"))

"""Files of a local disk: sizes and checksums, errors of listings, and what outlives a loss of power."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlhf.tuning.errors import with_causes

FETCHES = 3
"""How often a file is fetched that arrives with another checksum."""


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


_whole: dict[tuple[Path, str], tuple[int, ...]] = {}
"""The mark of each file that this process has checked, by its path and checksum."""


def is_whole(path: Path, sha256: str) -> bool:
    """Whether a file has this checksum: read once in a process, and again after a change of its mark."""
    if _whole.get((path, sha256)) == (mark := _mark(path)) and mark:
        return True
    if not mark or sha256_file(path) != sha256:
        return False
    _whole[path, sha256] = mark
    return True


def note_whole(path: Path, sha256: str) -> None:
    """Note that a file has this checksum."""
    _whole[path, sha256] = _mark(path)


def _mark(path: Path) -> tuple[int, ...]:
    """What differs between two contents of a file; empty if there is none."""
    with contextlib.suppress(FileNotFoundError):
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino
    return ()


def fetched(fs: Any, source: str, target: Path, sha256: str) -> bool:
    """Brings a file of a file system here; whether it has this checksum. One that has not is fetched again first: what
    was damaged on its way is whole where it came from."""
    for _ in range(FETCHES):
        fs.get_file(source, str(target))
        if sha256_file(target) == sha256:
            return True
    return False


@functools.cache
def umask() -> int:
    """The bits that this process takes from the modes of new files."""
    # It can only be asked for by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


FULL = {errno.ENOSPC: "No space left on device", errno.EDQUOT: "Disk quota exceeded"}
FAULTS = FULL | {errno.EIO: "Input/output error", errno.ESTALE: "Stale file handle"}
AGAIN = "and give the same command again: it goes on from what is finished"

FILE_URL = "file://"
ANSWER = ("response", "status_code", "code")
"""Attributes of an error that is the answer of a service."""
LIBRARIES = ("safetensors", "safetensors_rust")
"""Whose errors of classes of their own tell of files of this machine."""


class DiskFault(OSError):
    """A disk is full or fails; the message names the place and the remedy."""


def disk_fault(error: BaseException, folder: Path) -> DiskFault | None:
    """Return the fault of a disk that has caused an error, with its place and a remedy; None if no disk has.

    folder: where most is written, if the error names no file.
    """
    told: tuple[BaseException, int] | None = None
    for found in with_causes(error, suppressed=True):
        if isinstance(found, DiskFault):
            return found
        named = isinstance(found, OSError) and found.filename is not None
        if isinstance(found, OSError) and found.errno in (FAULTS if named else FULL) and _is_local(found):
            assert found.errno is not None
            return _fault(found.errno, found, folder)
        # By its text: clients of services raise EIO with another one.
        # What fails besides is in texts of programs and of data too.
        texts = FAULTS if isinstance(found, OSError) or _of_library(found) else FULL
        number = next((n for n, text in texts.items() if text in str(found)), None)
        told = told if number is None else (found, number)
    # Others pass on the text of the last one, which has met it.
    return _fault(told[1], told[0], folder) if told is not None and _tells_of_local(told[0]) else None


def _is_local(error: BaseException) -> bool:
    """Whether no service has given this error as its answer, and it is of no file elsewhere."""
    name = getattr(error, "filename", None)
    remote = isinstance(name, str) and "://" in name and not name.startswith(FILE_URL)
    return not remote and not any(hasattr(error, attribute) for attribute in ANSWER)


def _tells_of_local(error: BaseException) -> bool:
    """Whether an error without a number is one of this machine's files.

    Libraries in C++ and Rust raise OSError, RuntimeError or ValueError with the text alone; clients of services have
    classes of their own. RuntimeError is also what callers of a service make of its answer, with its URL.
    """
    if not _is_local(error):
        return False
    if isinstance(error, RuntimeError | ValueError):
        return "://" not in str(error) or FILE_URL in str(error)
    return isinstance(error, OSError) or _of_library(error)


def _of_library(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] in LIBRARIES


def _fault(number: int, error: BaseException, folder: Path) -> DiskFault:
    name = getattr(error, "filename", None)
    place = Path(os.fsdecode(name).removeprefix(FILE_URL)) if isinstance(name, str | bytes) else folder
    remedy = _room(place) if number in FULL else f"{place} could not be read or written. Check its disk, {AGAIN}"
    return DiskFault(number, f"{FAULTS[number]}: {remedy}")


def check_room(folder: Path, size: int) -> None:
    """Raises DiskFault where a folder has no room for `size` bytes more."""
    free = shutil.disk_usage(_existing(folder)).free
    if free < size:
        raise DiskFault(
            errno.ENOSPC, f"{FULL[errno.ENOSPC]}: {size / 1e9:.1f} GB and more are to be written; {_room(folder)}"
        )


def _room(place: Path) -> str:
    usage = shutil.disk_usage(_existing(place))
    room = f"{usage.free / 1e6:,.0f} MB left of {usage.total / 1e6:,.0f}"
    return (
        f"the disk of {place} has {room}. Make room there (`rlhf gc` shows what can go; where it has no room for its "
        f"own small files, delete the log of an old run, runs/NAME/worker.log), {AGAIN}"
    )


def _existing(place: Path) -> Path:
    """The nearest folder above that is there."""
    return next((p for p in (place, *place.absolute().parents) if p.exists()), Path("/"))

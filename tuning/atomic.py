"""Files and folders that exist only when they are complete: written aside, synced to disk, then renamed.

Without the sync a loss of power can leave the new name with an empty file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_partial(path: Path) -> bool:
    """Whether a killed process has left this file or folder."""
    return path.name.startswith(".") and path.name.endswith(".part")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path next to `path` to write to. It replaces `path` when the block ends, and is removed if the block raises.

    The name is hidden, ends in `.part` and is unique to the call. Parents are created.
    """
    partial = _partial(path)
    try:
        yield partial
        _sync(partial)
        # Atomic within a file system, hence a name in the same folder.
        os.replace(partial, path)
        _sync(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Like `whole_file`, for a new folder. If `path` exists by then, it stays and the new folder is dropped."""
    partial = _partial(path)
    partial.mkdir()
    try:
        yield partial
        for below in [*partial.rglob("*"), partial]:
            _sync(below)
        try:
            partial.rename(path)
            _sync(path.parent)
        except OSError:
            # A rename onto a folder with content fails: another process was first.
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")


def _sync(path: Path) -> None:
    """Has a file, or the names in a folder, on the disk when it returns."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (PermissionError, IsADirectoryError):
        # Some systems open no folders, and a file may be closed to its owner.
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        # File systems that have nothing to sync say so; a full or broken disk says something else.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)

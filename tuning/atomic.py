"""Files and folders that exist only when they are complete: written aside, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_partial(path: Path) -> bool:
    """Whether a file or folder is one that a killed process has left behind."""
    return path.name.startswith(".") and path.name.endswith(".part")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to. It replaces `path` when the block ends, and is removed if the block raises.

    The name is hidden, ends in `.part` and is unique to the call. Parents are created. Data are not synced to disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    try:
        yield partial
        # Atomic within a file system, hence a name in the same folder.
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Like `whole_file`, for a new folder. If `path` exists by then, it stays and the new folder is dropped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    partial.mkdir()
    try:
        yield partial
        try:
            partial.rename(path)
        except OSError:
            # A rename onto a folder with content fails: another process was first.
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)

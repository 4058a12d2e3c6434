"""Files and folders that exist only when they are complete: written aside, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` when the block ends, and is removed if it raises.

    The name is hidden, ends in `.part` and is this process's alone; parents are made. The data are not synced to disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """As `whole_file`, for a new folder. Where `path` was made meanwhile, that one stays and this one is dropped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    partial.mkdir()
    try:
        yield partial
        try:
            partial.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)

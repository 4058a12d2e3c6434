"""Files that are created in one step, and by one process alone: on a local disk, and on object stores."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

from rlhf.stages.store import readonly
from rlhf.stages.store.artifacts import Store


def create(store: Store, path: str, data: bytes) -> bool:
    """Creates a file with its content; False where there is one already."""
    readonly.refuse(store)
    try:
        # A link appears with its content; a file that is opened is empty at first, and could be read so.
        if store.is_local and _link(path, data):
            return True
        with store.fs.open(path, "xb") as f:
            try:
                f.write(data)
                f.flush()
            except OSError:
                # On a full disk an empty file would stand there for good.
                if store.is_local:
                    os.unlink(path)
                raise
    except FileExistsError:
        return False
    return True


def _link(path: str, data: bytes) -> bool:
    """Creates `path` by a hard link; False on a file system without hard links. Raises FileExistsError."""
    # Named as `rlhf.tuning.atomic` does: a collection takes what a kill leaves.
    partial = Path(path).with_name(f".{Path(path).name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    try:
        with partial.open("xb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.link(partial, path)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            return False
        raise
    finally:
        partial.unlink(missing_ok=True)
    return True

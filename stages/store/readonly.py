"""Read-only stores: `RLHF_READ_ONLY=1`, or a store that this user may not write to."""

from __future__ import annotations

import errno
import os
from typing import Any

VARIABLE = "RLHF_READ_ONLY"
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS)


class ReadOnlyStore(RuntimeError):
    """A change of a read-only store was refused."""


def asked() -> bool:
    """Whether the environment forbids changes of stores."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def refuse(store: Any) -> None:
    """Raise ReadOnlyStore if the environment forbids changes of stores, or this user may not write to a store."""
    if asked():
        raise ReadOnlyStore(f"{store.shown} would be changed, and {VARIABLE} is set: unset it to change a store")
    if store.read_only:
        raise ReadOnlyStore(
            f"{store.shown} would be changed, and this user may not write to it, or its disk is read-only: make it "
            "writable, or name another store (--store)"
        )


def unwritable(folder: str) -> bool:
    """Whether a store's folder exists, and this user may write neither to it nor to its folders, or the disk is
    read-only."""
    folders = [folder, *(os.path.join(folder, name) for name in ("artifacts", "runs"))]
    return os.path.isdir(folder) and not any(os.path.isdir(one) and os.access(one, os.W_OK) for one in folders)


def refused(error: Exception) -> bool:
    """Whether an error says that a store may not be changed."""
    # Clients of object stores raise PermissionError without a number.
    return isinstance(error, ReadOnlyStore | PermissionError) or getattr(error, "errno", None) in _REFUSALS

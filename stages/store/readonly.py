"""Stores that are only looked at: `RLHF_READ_ONLY=1`, or one that this user may not write to."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

VARIABLE = "RLHF_READ_ONLY"
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS)


class ReadOnlyStore(RuntimeError):
    """What would have changed a store that is only to be looked at."""


def asked() -> bool:
    """Whether the environment says that no store may be changed."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def refuse(place: str) -> None:
    """Raises ReadOnlyStore where no store may be changed."""
    if asked():
        raise ReadOnlyStore(f"{place} would be changed, and {VARIABLE} is set: unset it to change a store")


def unwritable(folder: str) -> bool:
    """Whether a folder is there and this user may not write to it, or the disk is read-only."""
    return os.path.isdir(folder) and not os.access(folder, os.W_OK)


def refused(error: Exception) -> bool:
    """Whether an error says that a store may not be written to."""
    # Clients of object stores raise PermissionError without a number.
    return isinstance(error, ReadOnlyStore | PermissionError) or getattr(error, "errno", None) in _REFUSALS


def unless_refused(action: Callable[[], T]) -> T | None:
    """What an action returns; None where the store may not be written to."""
    try:
        return action()
    except Exception as e:
        if refused(e):
            return None
        raise

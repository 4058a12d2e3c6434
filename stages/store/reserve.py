"""A file that a store on a local disk deletes for room when the disk is full, for a collection or a last record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TypeVar

from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.disk import FULL

BYTES = 2**20
"""More than a collection or a record writes at a time."""
T = TypeVar("T")


def keep_room(store: Store) -> None:
    """Write the reserve file, unless it exists."""
    if store.is_local:
        with contextlib.suppress(OSError), open(store.join("room"), "xb") as room:
            # Zeros take no room on some file systems.
            room.write(os.urandom(BYTES))


def with_room(store: Store, action: Callable[[], T]) -> T:
    """Run an action, and on a full disk once more without the reserve file."""
    try:
        return action()
    except OSError as error:
        if error.errno not in FULL:
            raise
    with contextlib.suppress(OSError):
        os.remove(store.join("room"))
    return action()

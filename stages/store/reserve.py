"""Room that a store on a local disk keeps for a collection, and for the last record of a run, when the disk is full."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TypeVar

from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.disk import FULL, disk_fault

BYTES = 2**20
"""More than a collection or a record needs at a time."""
T = TypeVar("T")


def keep_room(store: Store) -> None:
    """Writes the file that is given up on a full disk, unless it is there."""
    if store.is_local:
        with contextlib.suppress(OSError), open(store.join("room"), "xb") as room:
            # Zeros take no room on some file systems.
            room.write(os.urandom(BYTES))


def with_room(store: Store, action: Callable[[], T]) -> T:
    """Runs an action, and once more in the room that was kept if the disk is full."""
    try:
        return action()
    except OSError as error:
        fault = disk_fault(error, store.scratch)
        if fault is None or fault.errno not in FULL:
            raise
    with contextlib.suppress(OSError):
        os.remove(store.join("room"))
    return action()

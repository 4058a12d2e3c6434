"""Room that a store on a local disk keeps for a collection, and for the last record of a run, when the disk is full."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from stages.store.artifacts import Store
from stages.store.disk import disk_fault

FILE = "room"
BYTES = 2**20
"""More than a collection or a record needs at a time."""
T = TypeVar("T")


def keep_room(store: Store) -> None:
    """Writes the file that is given up on a full disk, unless it is there."""
    room = Path(store.root, FILE)
    if store.is_local and not room.exists():
        with contextlib.suppress(OSError):
            # Zeros take no room on some file systems.
            room.write_bytes(os.urandom(BYTES))


def with_room(store: Store, action: Callable[[], T]) -> T:
    """Runs an action, and once more in the room that was kept if the disk is full."""
    try:
        return action()
    except OSError as error:
        if disk_fault(error, store.scratch) is None:
            raise
    with contextlib.suppress(OSError):
        Path(store.root, FILE).unlink()
    return action()

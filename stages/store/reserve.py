"""Space that a store reserves on a local disk, for a collection or the last record of a run when the disk is full."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.disk import FULL, disk_fault
from rlhf.tuning.atomic import whole_file

BYTES = 2**20
"""More than a collection or a record needs at a time."""
T = TypeVar("T")


def keep_room(store: Store) -> None:
    """Write the file that is given up on a full disk, unless it exists."""
    if store.is_local and not os.path.exists(path := store.join("room")):
        # Whole or not at all: a short one would be taken for a reserve.
        with contextlib.suppress(OSError), whole_file(Path(path)) as room:
            # Zeros take no room on some file systems.
            room.write_bytes(os.urandom(BYTES))


def with_room(store: Store, action: Callable[[], T]) -> T:
    """Run an action; on a full disk give up the reserved file and run it once more."""
    try:
        return action()
    except OSError as error:
        fault = disk_fault(error, store.scratch)
        if fault is None or fault.errno not in FULL:
            raise
    with contextlib.suppress(OSError):
        os.remove(store.join("room"))
    return action()

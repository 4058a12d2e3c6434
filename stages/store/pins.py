"""Pins: runs that are never collected, a file each in `pins/` of the store."""

from __future__ import annotations

import contextlib
import datetime
import getpass
import socket
from typing import Any

from rlhf.stages.store.artifacts import Store

FOLDER = "pins"
_UNREAD = {"note": "", "by": "?", "at": "?"}


def who() -> str:
    """The user and host of this process, for records of who did what."""
    user = "unknown"
    # A container's user may have no name.
    with contextlib.suppress(KeyError, OSError):
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"


def pin(store: Store, run: str, note: str = "") -> None:
    """Pins a run; a second pin replaces the note of the first. Atomic on every file system."""
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    store.write_json({"run": run, "note": note, "by": who(), "at": at}, FOLDER, f"{run}.json")


def unpin(store: Store, run: str) -> bool:
    """Takes a run's pin away; False where it had none."""
    path = FOLDER, f"{run}.json"
    # An object store removes what is not there without a word.
    if not store.exists(*path):
        return False
    with contextlib.suppress(FileNotFoundError):
        store.remove(store.join(*path))
    return True


def pins(store: Store) -> dict[str, dict[str, Any]]:
    """The pins of a store by run. A pin that is no JSON, or other JSON, still holds its run."""
    found = {}
    for name in store.names(FOLDER):
        if not name.endswith(".json"):
            continue
        run = name.removesuffix(".json")
        try:
            value = store.read_json(FOLDER, name)
        except RuntimeError:
            value = _UNREAD | {"run": run}
        # None: taken away since the folder was read.
        if value is not None:
            found[run] = value if isinstance(value, dict) else _UNREAD | {"run": run}
    return found

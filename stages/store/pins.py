"""Pins: runs that are never collected; each has a file in `pins/` of the store."""

from __future__ import annotations

import contextlib
import datetime
import getpass
import socket
from typing import Any

from rlhf.stages.store.artifacts import ArtifactError, Store

FOLDER = "pins"


def who() -> str:
    """Return user@host of this process, for records."""
    user = "unknown"
    # A container's user may have no name.
    with contextlib.suppress(KeyError, OSError):
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"


def pin(store: Store, run: str, note: str = "") -> None:
    """Pin a run; a second pin replaces the note of the first."""
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    store.write_json({"run": run, "note": note, "by": who(), "at": at}, FOLDER, f"{run}.json")


def unpin(store: Store, run: str) -> bool:
    """Remove a run's pin; return False if it had none."""
    path = FOLDER, f"{run}.json"
    # An object store does not report the removal of a missing object.
    if not store.exists(*path):
        return False
    with contextlib.suppress(FileNotFoundError):
        store.remove(store.join(*path))
    return True


def pins(store: Store) -> dict[str, dict[str, Any]]:
    """Return the pins of a store by run. An unreadable pin still keeps its run."""
    found = {}
    for name in store.names(FOLDER):
        run, dot, _ = name.rpartition(".json")
        if dot:
            value = None
            with contextlib.suppress(ArtifactError):
                value = store.read_json(FOLDER, name)
            found[run] = value if isinstance(value, dict) else {"run": run, "note": "", "by": "?", "at": "?"}
    return found

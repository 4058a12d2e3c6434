"""What fingerprints have read of modules, kept for the processes after this one: parsing is most of a cached run.

A reading counts for the content that it was taken of, whatever the file's times say, and as long as the names that were
looked up for it are modules of this project, or none, as they were then.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.tuning import digest_cache
from rlhf.tuning.atomic import whole_file

_lock = threading.Lock()
_known: dict[str, Any] = {}
_new: dict[str, Any] = {}


def _file() -> Path:
    return digest_cache.folder() / "code.json"


def _kept() -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(_file().read_bytes())
        if isinstance(value, dict):
            return value
    return {}


IsOwn = Callable[[str], bool]
"""Whether there is a module of this name in the project."""


def of_module(place: str, state: list[Any], is_own: IsOwn, read: Callable[[IsOwn], Any]) -> Any:
    """What `read` finds in a module, as JSON: read once for each `state`, its content and its reader.

    place: the module's file, and behind a zero how it is looked at. read: asks the function that it is given, and
    nothing else that may change.
    """
    with _lock:
        if not _known:
            _known.update(_kept())
        entry = _known.get(place)
    if entry is not None and entry.get("state") == state and all(is_own(n) == own for n, own in entry["asked"].items()):
        return entry["found"]
    asked: dict[str, bool] = {}

    def ask(name: str) -> bool:
        asked[name] = is_own(name)
        return asked[name]

    found = read(ask)
    with _lock:
        _known[place] = _new[place] = {"state": state, "asked": asked, "found": found}
    return found


def keep() -> None:
    """Writes what is new; what other processes have written meanwhile stays, of files that are still there."""
    with _lock:
        if not _new:
            return
        entries = {p: e for p, e in (_kept() | _new).items() if Path(p.split("\0")[0]).exists()}
        _new.clear()
    # Read-only homes and full disks cost time, nothing else.
    with contextlib.suppress(OSError), whole_file(_file()) as partial:
        partial.write_text(json.dumps(entries))

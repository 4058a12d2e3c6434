"""A cache of parsed modules for fingerprints, shared by processes: parsing is most of the time of a cached run.

An entry is valid for the content of the module, whatever its file's times are, and while the names that the parser
looked up still are modules of this project, or still are not.
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
"""Whether the project has a module of this name."""


def of_module(place: str, state: list[Any], is_own: IsOwn, read: Callable[[IsOwn], Any]) -> Any:
    """Return the JSON value that `read` returns for a module, cached by `state` (its content and the parser).

    place: the module's file, and after a zero the other arguments of the parser. read: depends only on `state` and on
    the function that it gets.
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
    """Write new entries next to those of other processes; drop entries of files that are gone."""
    with _lock:
        if not _new:
            return
        entries = {p: e for p, e in (_kept() | _new).items() if Path(p.split("\0")[0]).exists()}
        _new.clear()
    # A read-only home or a full disk only costs time.
    with contextlib.suppress(OSError), whole_file(_file()) as partial:
        partial.write_text(json.dumps(entries))

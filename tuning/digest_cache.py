"""Digests of large files, cached by their file system's attributes: an unchanged file is read once.

A digest is taken for a file whose size, times, inode and device are those of when it was read; for an object of a
store, its size and ETag. A file that was changed shortly before it was read is not remembered: a further change within
the clock's step would show in none of these. The time of the last change of the inode counts too, which no program
sets: a copy with the times of another file is not taken for that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.tuning.atomic import whole_file
from rlhf.tuning.names import cache_folder

SMALLEST = 2**20
"""Bytes from which on it is worth it."""
SETTLED_SECONDS = 2.0
"""Age of the last change from which on it is seen by its time: FAT has steps of two seconds, others far less."""


def folder() -> Path:
    """Where digests are remembered: in the scratch folder of this machine."""
    return cache_folder("RLHF_SCRATCH", "scratch") / "digests"


def of_file(path: str | Path, read: Callable[[], str]) -> str:
    """The digest of a local file, which `read` computes where it is not known."""
    place = os.path.realpath(path)
    known = _state(place)
    if known is None:
        return read()
    return _remembered(place, known, read, lambda: _state(place) == known and _settled(known))


def of_object(url: str, info: dict[str, Any], read: Callable[[], str]) -> str:
    """The digest of an object by its `info` in fsspec's words; computed where that has no ETag."""
    tag, size = info.get("ETag") or info.get("etag"), info.get("size")
    if not isinstance(tag, str) or tag.startswith("W/") or not isinstance(size, int) or size < SMALLEST:
        return read()
    return _remembered(url, {"tag": tag, "size": size}, read, lambda: True)


def _state(place: str) -> dict[str, Any] | None:
    """Attributes that differ if a file's content does; None for a small or missing file."""
    try:
        stat = os.stat(place)
    except OSError:
        return None
    if stat.st_size < SMALLEST:
        return None
    times = {"changed": stat.st_mtime_ns, "touched": stat.st_ctime_ns}
    return {"size": stat.st_size, "inode": stat.st_ino, "device": stat.st_dev, **times}


def _settled(known: dict[str, Any]) -> bool:
    return time.time_ns() - max(known["changed"], known["touched"]) > SETTLED_SECONDS * 1e9


def _remembered(place: str, known: dict[str, Any], read: Callable[[], str], certain: Callable[[], bool]) -> str:
    name = hashlib.sha256(place.encode(errors="surrogatepass")).hexdigest()
    entry = folder() / name[:2] / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        value = json.loads(entry.read_bytes())
        if value["state"] == known:
            return str(value["digest"])
    digest = read()
    # Read-only homes and full disks cost time, nothing else.
    if certain():
        with contextlib.suppress(OSError), whole_file(entry) as partial:
            partial.write_text(json.dumps({"state": known, "digest": digest}))
    return digest

"""One maker for one key at a time.

A lease is a small file, created only if absent, rewritten by a heartbeat. A lease of this host is
dead when its process is gone; one of another host when its beat is old. Dead ones are taken over.
Leases save work; nothing's correctness rests on them, since commits are atomic and equal keys mean
equal content.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.store.artifacts import ArtifactError, Store

BEAT_SECONDS = 5.0
DEAD_AFTER_SECONDS = 30.0
POLL_SECONDS = 1.0
SETTLE_SECONDS = 0.3


def _started(pid: int) -> float | None:
    """When a process of this host started, in clock ticks; 0 where the system does not say, None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return None if fields[0] in "ZX" else float(fields[19])
    except (OSError, ValueError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0.0
    return 0.0


@functools.cache
def _host() -> str:
    """Where process ids mean what they mean here: host name, boot and, in a container, its own set of processes."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


@contextmanager
def lease(store: Store, stage: str, key: str, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Holds the lease of a key; waits, and says so once, while somebody alive holds it."""
    name = f"{stage}-{key}.json"
    path = store.join("leases", name)
    store.fs.makedirs(store.join("leases"), exist_ok=True)
    token = uuid.uuid4().hex
    told = False
    while not _create(store, path, token):
        holder = _holder(store, name)
        if holder is None:
            continue
        if _dead(holder):
            with contextlib.suppress(FileNotFoundError):
                store.fs.rm(path)
            if _create(store, path, token):
                # Another that saw the same dead lease may yet remove what was just created: it wins then.
                time.sleep(SETTLE_SECONDS)
                if (_holder(store, name) or {}).get("token") == token:
                    break
            continue
        if not told:
            on_wait(f"{stage} is being made by process {holder['pid']} on {holder['host'].split()[0]}; waiting for it")
            told = True
        time.sleep(POLL_SECONDS)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(BEAT_SECONDS):
            # A store that cannot be reached for a while is no reason to stop the work.
            with contextlib.suppress(Exception):
                if (_holder(store, name) or {}).get("token") != token:
                    return
                store.write_bytes(_record(token), "leases", name)

    thread = threading.Thread(target=beat, name="lease-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        holder = _holder(store, name)
        if holder is not None and holder["token"] == token:
            with contextlib.suppress(FileNotFoundError):
                store.fs.rm(path)


def this_process() -> dict[str, Any]:
    """What tells this process from every other."""
    return {"pid": os.getpid(), "started": _started(os.getpid()), "host": _host()}


def is_gone(process: dict[str, Any]) -> bool | None:
    """Whether a process, as it described itself, has ended; None where that cannot be seen from this host."""
    if process["host"] != _host():
        return None
    started = _started(process["pid"])
    return started is None or abs(started - process["started"]) >= 1


def _record(token: str) -> bytes:
    return json.dumps({"token": token, "beat": time.time()} | this_process()).encode()


def _holder(store: Store, name: str) -> dict[str, Any] | None:
    """Who holds a lease; one that cannot be read is nobody's, and long dead."""
    try:
        return store.read_json("leases", name)
    except ArtifactError:
        return {"token": None, "pid": 0, "started": 0.0, "host": "unknown", "beat": 0.0}


def _create(store: Store, path: str, token: str) -> bool:
    """Writes the lease if there is none: in one step, so that nobody reads half of it."""
    try:
        if store.is_local and _link(path, _record(token)):
            return True
        with store.fs.open(path, "xb") as f:
            f.write(_record(token))
    except FileExistsError:
        return False
    return True


def _link(path: str, data: bytes) -> bool:
    """Writes `path` by a hard link; False on a file system that has none. Raises FileExistsError if it is there."""
    partial = Path(f"{path}.{uuid.uuid4().hex}")
    partial.write_bytes(data)
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:
        return False
    finally:
        partial.unlink()
    return True


def _dead(holder: dict[str, Any]) -> bool:
    # Where the system knows it counts: a stopped or sleeping process still holds what it holds.
    gone = is_gone(holder)
    return time.time() - holder["beat"] > DEAD_AFTER_SECONDS if gone is None else gone

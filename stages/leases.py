"""One maker for one key at a time.

A lease is a small file, created only if absent, rewritten by a heartbeat. A lease whose beat is
old, or whose process is gone from this host, is dead and taken over. Leases save work; nothing's
correctness rests on them, since commits are atomic and equal keys mean equal content.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stages.artifacts import Store

BEAT_SECONDS = 5.0
DEAD_AFTER_SECONDS = 30.0


def _alive_here(pid: int, started: float) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            ticks = int(f.read().rsplit(")", 1)[1].split()[19])
    except FileNotFoundError:
        return False
    except (OSError, ValueError, IndexError):
        return True
    return abs(ticks - started) < 1


def _own_start() -> float:
    try:
        with open("/proc/self/stat") as f:
            return float(f.read().rsplit(")", 1)[1].split()[19])
    except OSError:
        return 0.0


@contextmanager
def lease(store: Store, stage: str, key: str, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Holds the lease of a key; waits, and says so once, while somebody alive holds it."""
    path = store.join("leases", f"{stage}-{key}.json")
    store.fs.makedirs(store.join("leases"), exist_ok=True)
    token = uuid.uuid4().hex
    told = False
    while not _create(store, path, token):
        holder = store.read_json("leases", f"{stage}-{key}.json")
        if holder is None:
            continue
        if _dead(holder):
            # Of two that see the same dead lease, the create that follows picks one.
            store.fs.rm(path)
            continue
        if not told:
            on_wait(f"{stage} is being made by process {holder['pid']} on {holder['host']}; waiting for it")
            told = True
        time.sleep(1.0)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(BEAT_SECONDS):
            store.write_bytes(_record(token), "leases", f"{stage}-{key}.json")

    thread = threading.Thread(target=beat, name="lease-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        holder = store.read_json("leases", f"{stage}-{key}.json")
        if holder is not None and holder["token"] == token:
            store.fs.rm(path)


def _record(token: str) -> bytes:
    return json.dumps(
        {
            "token": token,
            "pid": os.getpid(),
            "started": _own_start(),
            "host": socket.gethostname(),
            "beat": time.time(),
        }
    ).encode()


def _create(store: Store, path: str, token: str) -> bool:
    try:
        with store.fs.open(path, "xb") as f:
            f.write(_record(token))
    except FileExistsError:
        return False
    return True


def _dead(holder: dict) -> bool:
    if time.time() - holder["beat"] > DEAD_AFTER_SECONDS:
        return True
    return holder["host"] == socket.gethostname() and not _alive_here(holder["pid"], holder["started"])

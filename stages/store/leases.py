"""Leases: only one process at a time makes the artifact of a key.

A lease is a small file, which is created only if absent and which a heartbeat rewrites. It is stale if its process has
ended (on this host), or if it has not changed for a while by the clock of the waiting process (on another host, whose
clock may be off). A waiting process takes over a stale lease. Before a commit a process checks that it still holds its
lease (`check`): a machine that was suspended must not write while another one makes the same artifact.
"""

from __future__ import annotations

import contextlib
import errno
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
from typing import Any, TypeVar

from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.disk import FULL
from rlhf.stages.store.exclusive import create
from rlhf.stages.store.json_schemas import HOLDER
from rlhf.stages.store.readonly import ReadOnlyStore, refuse
from rlhf.tuning.retries import retried

T = TypeVar("T")

# A holder writes a beat; without one for DEAD_AFTER_SECONDS a lease of another host is stale. SETTLE_SECONDS is
# longer than a process usually takes from seeing a stale lease to removing it.
BEAT_SECONDS = 5.0
DEAD_AFTER_SECONDS = 30.0
POLL_SECONDS = 1.0
SETTLE_SECONDS = 0.3
CLOCKS_SECONDS = 600.0
"""Largest expected difference between the clocks of two hosts, for a decision by a single look at a lease."""
TRIES, FIRST_PAUSE_SECONDS = 7, 0.5
"""Requests, over half a minute, to a store that does not answer; then its error ends a wait for a lease."""


class LeaseLost(RuntimeError):
    """Another process has taken over the work of this one."""


def _started(pid: int) -> float | None:
    """Return the start time of a process of this host in clock ticks; 0 if unknown, None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            # The command, in brackets, may hold spaces and brackets. After it the first field is the state and
            # the twentieth the start time (proc(5), fields 3 and 22).
            fields = f.read().rsplit(")", 1)[1].split()
        return None if fields[0] in "ZX" else float(fields[19])
    except (OSError, ValueError, IndexError):
        pass
    try:
        # Without /proc: signal 0 only asks whether the process exists.
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0.0
    return 0.0


@functools.cache
def host_scope() -> str:
    """Return the scope in which a process id is unique: host name, boot and, on Linux, PID namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def process_folder() -> str:
    """Return the name of this process's own folder: host, PID namespace and process id."""
    return f"{_space()}-{os.getpid()}"


def _space() -> str:
    # Containers may share a name, and processes of other namespaces are not in /proc.
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def is_alive(folder: str) -> bool | None:
    """Whether the process of a folder (`process_folder`) lives; None if it is not seen from here."""
    space, _, number = folder.rpartition("-")
    if space != _space() or not number.isdigit() or not Path("/proc").exists():
        return None
    return Path("/proc", number).exists()


@contextmanager
def lease(
    store: Store, stage: str, key: str, on_wait: Callable[[str], None], check_time: Callable[[], None] = lambda: None
) -> Iterator[str]:
    """Hold the lease of a key, and yield its token; wait while a live process holds it.

    on_wait: called once, with a line about the holder. check_time: called each second; its error ends the wait.
    """
    name = _name(stage, key)
    path = store.join("leases", name)
    token = uuid.uuid4().hex
    announced, watch = False, Watch()
    refuse(store)
    _again(lambda: store.fs.makedirs(store.join("leases"), exist_ok=True))
    while not _again(lambda: create(store, path, _record(token))):
        holder = _again(lambda: holder_of(store, stage, key))
        # Released in between.
        if holder is None:
            continue
        # The first request created the file and its answer was lost.
        if holder["token"] == token:
            break
        if watch.dead(holder):
            _again(functools.partial(_release, store, stage, key, holder["token"]))
            # Of a request whose answer was lost the next try returns False, too: the token decides.
            _again(lambda: create(store, path, _record(token)))
            # A process that saw the same stale lease may still remove the one just created; then that process wins.
            time.sleep(SETTLE_SECONDS)
            if (_again(lambda: holder_of(store, stage, key)) or {}).get("token") == token:
                break
            continue
        if not announced:
            host = holder["host"].split()[0]
            on_wait(f"{stage} is being made by process {holder['pid']} on {host}; waiting for it")
            announced = True
        check_time()
        time.sleep(POLL_SECONDS)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(BEAT_SECONDS):
            # An unreachable store must not stop the work: `check` decides at its end.
            with contextlib.suppress(Exception):
                # A file system may show a record torn, or none, for a moment: only another's token ends the beat.
                if (holder_of(store, stage, key) or {}).get("token") not in (None, token):
                    return
                store.write_bytes(_record(token), "leases", name)

    thread = threading.Thread(target=beat, name="lease-heartbeat", daemon=True)
    thread.start()
    try:
        yield token
    finally:
        stop.set()
        thread.join()
        # A lease that cannot be removed is stale when this process ends.
        with contextlib.suppress(Exception):
            retried(lambda: _release(store, stage, key, token), tries=2, first_seconds=FIRST_PAUSE_SECONDS)


def _release(store: Store, stage: str, key: str, token: str | None) -> None:
    if (holder_of(store, stage, key) or {}).get("token") == token:
        with contextlib.suppress(FileNotFoundError):
            store.remove(store.join("leases", _name(stage, key)))


class _Held(Exception):
    """A live process holds the lease."""


def unless_held(store: Store, stage: str, key: str, step: Callable[[Callable[[], None]], object]) -> bool:
    """Run a step under the lease of a key; return False, without a long wait, if a live process holds or takes it.

    step: gets a function that raises LeaseLost if another process has the lease, and calls it before each removal.
    """
    deadline = time.monotonic() + 2 * DEAD_AFTER_SECONDS

    def give_up() -> None:
        if time.monotonic() > deadline or beats(store, stage, key):
            raise _Held

    try:
        if not beats(store, stage, key):
            with lease(store, stage, key, lambda line: None, give_up) as token:
                step(lambda: check(store, stage, key, token))
                return True
    except (_Held, LeaseLost):
        pass
    return False


def clear(store: Store, stage: str, key: str) -> None:
    """Remove the lease that a process left which was killed after its commit; `rlhf gc` does it in a remote store."""
    # Of a process on another host it would have to wait for a sign of life.
    if store.is_local and (holder := holder_of(store, stage, key)) is not None and is_gone(holder):
        unless_held(store, stage, key, lambda check: None)


def check(store: Store, stage: str, key: str, token: str) -> None:
    """Raise LeaseLost if the lease of a key does not have this token."""
    holder = _again(lambda: holder_of(store, stage, key))
    if holder is None or holder["token"] != token:
        by = "is gone" if holder is None else f"is process {holder['pid']}'s on {holder['host'].split()[0]} now"
        raise LeaseLost(
            f"the lease of {stage} {key[:12]} {by}: this machine was silent for too long, and its result is not "
            "committed; the same command continues with the other process's result"
        )


class Watch:
    """Whether the holder of a lease is alive, as one waiting process sees it."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._since = self._looked = 0.0

    def dead(self, holder: dict[str, Any]) -> bool:
        """Whether the holder has ended, or has not changed its record for DEAD_AFTER_SECONDS since the first call."""
        # The process table outranks the beat: a stopped process still holds its lease.
        if (gone := is_gone(holder)) is not None:
            return gone
        # Without hard links a lease is empty while it is written, so an unreadable one has its time too.
        seen, now = (holder["token"], holder["beat"]), time.monotonic()
        # After a pause between two looks the store may have been away, for the holder as well.
        if seen != self._seen or now - self._looked > 2 * BEAT_SECONDS:
            self._since = now
        self._seen, self._looked = seen, now
        return now - self._since > DEAD_AFTER_SECONDS


def _again(action: Callable[[], T]) -> T:
    # A full disk stays full, and a local folder another user's. Clients of object stores have their own errors.
    return retried(
        action,
        tries=TRIES,
        first_seconds=FIRST_PAUSE_SECONDS,
        passing=lambda e: (
            not isinstance(e, ArtifactError | ReadOnlyStore)
            and getattr(e, "errno", None) not in {*FULL, errno.EACCES, errno.EROFS}
        ),
    )


def _name(stage: str, key: str) -> str:
    return f"{stage}-{key}.json"


def this_process() -> dict[str, Any]:
    """Return the identity of this process: its id, start time and scope (`host_scope`)."""
    return {"pid": os.getpid(), "started": _started(os.getpid()), "host": host_scope()}


def is_gone(process: dict[str, Any]) -> bool | None:
    """Whether a process (`this_process`) has ended; None if this host cannot see it."""
    if process["host"] != host_scope():
        return None
    started = _started(process["pid"])
    if started is not None and process["started"] is None:
        return None
    # A process id may be in use again: the start times differ then.
    return started is None or abs(started - process["started"]) >= 1


def rebooted(process: dict[str, Any]) -> bool:
    """Whether a process ran on a host of this name in another boot."""
    then, here = process["host"].split(), host_scope().split()
    return then[0] == here[0] and then[1:2] != here[1:2]


def booted() -> float:
    """Return when this host booted, in seconds since 1970; 0 if unknown."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/stat") as file:
        return float(next(line.split()[1] for line in file if line.startswith("btime ")))
    return 0.0


def beats(store: Store, stage: str, key: str) -> bool:
    """Whether a live process seems to hold the lease of a key.

    A holder on another host lives by its own clock, which may be off by `CLOCKS_SECONDS`.
    """
    holder = holder_of(store, stage, key)
    if holder is None:
        return False
    gone = is_gone(holder)
    if gone is not None:
        return not gone
    longest = DEAD_AFTER_SECONDS + (0.0 if rebooted(holder) else CLOCKS_SECONDS)
    return abs(time.time() - holder["beat"]) <= longest


def remove_stale(store: Store, stage: str, key: str) -> None:
    """Remove the lease of a key, unless a live process has it."""
    if not beats(store, stage, key):
        store.remove(store.join("leases", _name(stage, key)))


def holder_of(store: Store, stage: str, key: str) -> dict[str, Any] | None:
    """Return the record of a lease; None if there is none. The token of an unreadable record is None."""
    try:
        return store.read_record(HOLDER, "leases", _name(stage, key))
    except ArtifactError:
        return {"token": None, "pid": 0, "started": 0.0, "host": "unknown", "beat": 0.0}


def _record(token: str) -> bytes:
    return json.dumps({"token": token, "beat": time.time()} | this_process()).encode()

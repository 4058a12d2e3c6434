"""Leases: one process at a time makes the artifact of a key.

A lease is a small file, created only if absent and rewritten by a heartbeat. It is stale when its process has ended
(on this host) or when it has not changed for a while by the clock of the one who waits (on another host, whose clock
may be off); a stale lease is taken over. Whoever commits asks first whether its lease is still its own (`check`): a
machine that was asleep must not write beside the one that took over.
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
from typing import Any, TypeVar

from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.disk import FULL
from rlhf.stages.store.exclusive import create
from rlhf.stages.store.json_schemas import HOLDER
from rlhf.tuning.retries import retried

T = TypeVar("T")

# A holder writes a beat; without one for DEAD_AFTER_SECONDS a lease of another host is stale. SETTLE_SECONDS is
# longer than a process usually takes from seeing a stale lease to removing it.
BEAT_SECONDS = 5.0
DEAD_AFTER_SECONDS = 30.0
POLL_SECONDS = 1.0
SETTLE_SECONDS = 0.3
CLOCKS_SECONDS = 600.0
"""By so much clocks of two hosts may differ where only one look at a lease is taken."""
TRIES, FIRST_PAUSE_SECONDS = 7, 0.5
"""A store that cannot be reached is asked so often, for half a minute, before its error ends a wait for a lease."""


class LeaseLost(RuntimeError):
    """Another process has taken over the work of this one."""


def _started(pid: int) -> float | None:
    """Start time of a process of this host in clock ticks; 0 where the system does not say, None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            # The command, in brackets, may hold spaces and brackets. Behind it the first field is the state and
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
    """The scope in which a process id is unique: host name, boot and, on Linux, PID namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


@contextmanager
def lease(
    store: Store, stage: str, key: str, on_wait: Callable[[str], None], check_time: Callable[[], None] = lambda: None
) -> Iterator[str]:
    """Holds the lease of a key, and gives its token. Waits while a live process holds it; `on_wait` is called once with
    a line about it, and `check_time` again and again: what it raises ends the wait."""
    name = _name(stage, key)
    path = store.join("leases", name)
    token = uuid.uuid4().hex
    announced, watch = False, Watch()
    store.fs.makedirs(store.join("leases"), exist_ok=True)
    while not _again(lambda: create(store, path, _record(token))):
        holder = _again(lambda: _holder(store, name))
        # Released in between: try again at once.
        if holder is None:
            continue
        # Created, and the answer was lost: a second try then finds one's own.
        if holder["token"] == token:
            break
        if watch.dead(holder):
            with contextlib.suppress(FileNotFoundError):
                store.remove(path)
            if create(store, path, _record(token)):
                # A process that saw the same stale lease may still remove the one just created; then that process wins.
                time.sleep(SETTLE_SECONDS)
                if (_holder(store, name) or {}).get("token") == token:
                    break
            continue
        if not announced:
            on_wait(_wait_line(stage, store.address("leases", name), holder))
            announced = True
        check_time()
        time.sleep(POLL_SECONDS)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(BEAT_SECONDS):
            # An unreachable store must not stop the work: `check` says in the end whether it was taken over.
            with contextlib.suppress(Exception):
                # A file system may show a record torn, or none, for a moment: only another's token ends the beat.
                if (_holder(store, name) or {}).get("token") not in (None, token):
                    return
                store.write_bytes(_record(token), "leases", name)

    thread = threading.Thread(target=beat, name="lease-heartbeat", daemon=True)
    thread.start()
    try:
        yield token
    finally:
        stop.set()
        thread.join()
        # What was made is made: a lease that cannot be given back is stale when this process ends.
        with contextlib.suppress(Exception):
            retried(lambda: _release(store, name, token), tries=2, first_seconds=FIRST_PAUSE_SECONDS)


def _release(store: Store, name: str, token: str) -> None:
    if (_holder(store, name) or {}).get("token") == token:
        store.remove(store.join("leases", name))


class _Held(Exception):
    """A live process holds the lease."""


def unless_held(store: Store, stage: str, key: str, step: Callable[[Callable[[], None]], bool]) -> bool:
    """Run a step under the lease of a key; False, without a long wait, if a live process holds it or takes it over.

    step: gets a function that raises LeaseLost where the lease is another's by now, and calls it before each removal.
    """
    deadline = time.monotonic() + 2 * DEAD_AFTER_SECONDS

    def give_up() -> None:
        if time.monotonic() > deadline or beats(store, stage, key):
            raise _Held

    try:
        if not beats(store, stage, key):
            with lease(store, stage, key, lambda line: None, give_up) as token:
                return step(lambda: check(store, stage, key, token))
    except (_Held, LeaseLost):
        pass
    return False


def release_dead(store: Store, stage: str, key: str) -> None:
    """Removes the lease of a key that is made, where its holder has ended on this host before it could give it back."""
    with contextlib.suppress(OSError):
        holder = _holder(store, _name(stage, key))
        if holder is not None and holder["token"] is not None and is_gone(holder):
            store.remove(store.join("leases", _name(stage, key)))


def _wait_line(stage: str, path: str, holder: dict[str, Any]) -> str:
    if holder["token"] is None:
        return f"{stage}: the lease {path} cannot be read; waiting for {DEAD_AFTER_SECONDS:g} s whether it is written"
    return f"{stage} is being made by process {holder['pid']} on {holder['host'].split()[0]}; waiting for it"


def check(store: Store, stage: str, key: str, token: str) -> None:
    """Raises LeaseLost where the lease of a key is not the one with this token."""
    holder = _again(lambda: _holder(store, _name(stage, key)))
    if holder is None or holder["token"] != token:
        by = "is gone" if holder is None else f"is process {holder['pid']}'s on {holder['host'].split()[0]} now"
        raise LeaseLost(
            f"the lease of {stage} {key[:12]} {by}: this machine was silent for too long, and what it made is not "
            "committed; the same command goes on with what the other makes"
        )


class Watch:
    """Whether the holder of a lease lives, as one who waits sees it."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._since = 0.0

    def dead(self, holder: dict[str, Any]) -> bool:
        """Whether it has ended, or not changed its record since it was first asked for so long."""
        # The process table outranks the beat: a stopped process still holds its lease.
        gone = is_gone(holder) if holder["token"] is not None else None
        if gone is not None:
            return gone
        # Without hard links a lease is empty for a moment, while it is written: one that is not read has its time too.
        seen = (holder["token"], holder["beat"])
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since > DEAD_AFTER_SECONDS


def _again(action: Callable[[], T]) -> T:
    # A full disk stays full.
    return retried(
        action,
        tries=TRIES,
        first_seconds=FIRST_PAUSE_SECONDS,
        passing=lambda e: isinstance(e, OSError) and e.errno not in FULL,
    )


def _name(stage: str, key: str) -> str:
    return f"{stage}-{key}.json"


def this_process() -> dict[str, Any]:
    """Identifies this process: its id, start time and scope (`host_scope`)."""
    return {"pid": os.getpid(), "started": _started(os.getpid()), "host": host_scope()}


def is_gone(process: dict[str, Any]) -> bool | None:
    """Whether a process, as `this_process` described it, has ended; None where this host cannot see that."""
    if process["host"] != host_scope():
        return None
    started = _started(process["pid"])
    if started is not None and process["started"] is None:
        return None
    # A process id may be in use again: the start times differ then.
    return started is None or abs(started - process["started"]) >= 1


def rebooted(process: dict[str, Any]) -> bool:
    """Whether a process was one of a host of this name, but of an earlier boot."""
    then, here = process["host"].split(), host_scope().split()
    return then[0] == here[0] and then[1:2] != here[1:2]


def booted() -> float:
    """When this host has booted, in seconds since 1970; 0 where the system does not say."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/stat") as file:
        return float(next(line.split()[1] for line in file if line.startswith("btime ")))
    return 0.0


def held(store: Store) -> set[tuple[str, str]]:
    """(stage, key) of every lease in a store, of live holders or not."""
    names = (name.removesuffix(".json").partition("-") for name in store.names("leases"))
    return {(stage, key) for stage, _, key in names}


def beats(store: Store, stage: str, key: str) -> bool:
    """Whether a live process seems to hold the lease of a key: on another host, by that one's clock, which may be off
    by `CLOCKS_SECONDS`."""
    holder = _holder(store, _name(stage, key))
    if holder is None:
        return False
    gone = is_gone(holder)
    if gone is not None:
        return not gone
    longest = DEAD_AFTER_SECONDS + (0.0 if rebooted(holder) else CLOCKS_SECONDS)
    return abs(time.time() - holder["beat"]) <= longest


def forsaken(store: Store) -> Iterator[tuple[str, Callable[[], None]]]:
    """Leases whose holders are gone: the name of each file, and what removes it unless it was taken over since."""
    for name in store.names("leases"):
        stage, dash, key = name.removesuffix(".json").partition("-")
        if dash and name.endswith(".json") and not name.startswith(".") and not beats(store, stage, key):
            yield name, functools.partial(_remove_forsaken, store, stage, key)


def _remove_forsaken(store: Store, stage: str, key: str) -> None:
    if not beats(store, stage, key):
        store.remove(store.join("leases", _name(stage, key)))


def held_by(store: Store, stage: str, key: str) -> dict[str, Any] | None:
    """The process that holds the lease of a key, as `this_process` describes one; None where none does."""
    holder = _holder(store, _name(stage, key))
    return None if holder is None else {name: holder[name] for name in ("pid", "started", "host")}


def beat_of(store: Store, stage: str, key: str) -> float | None:
    """The last beat of the lease of a key, by its holder's clock; None where there is none."""
    return (_holder(store, _name(stage, key)) or {}).get("beat")


def _record(token: str) -> bytes:
    return json.dumps({"token": token, "beat": time.time()} | this_process()).encode()


def _holder(store: Store, name: str) -> dict[str, Any] | None:
    """The record of the lease's holder, None where there is no lease. One that is not read has the token None."""
    try:
        return store.read_record(HOLDER, "leases", name)
    except ArtifactError:
        return {"token": None, "pid": 0, "started": 0.0, "host": "unknown", "beat": 0.0}

"""The process that children are forked from: it imports the target once, gives jobs to children, and ends them in time.

It has no threads and never waits for a child, so that none delays another. When its owner closes the stream or dies, it
kills all children with their descendants, and ends.

    owner to host   {"job": 7, "payload", "seconds", "megabytes", "tries", "session", "first"}, {"cancel": [7]},
                    {"end": session, "seconds"}
    host to owner   {"ready": processes} or {"refused": "..."}, then {"job": 7, "value"} or {"job": 7, "failure": kind,
                    "message": "..."}

A child has one session, or one stateless job after another: it makes the target and answers jobs.

    host to child   {"job": 7, "payload": ..., "megabytes": 1024}
    child to host   {"started": true} when it has read that, or {"refused": "..."}, then {"job": 7, "value": ...} or
                    {"job": 7, "error": "..."}

The code that a host has loaded has to be that of its pool: a node may have other files or packages.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from rlhf.tuning.parallel import children
from rlhf.tuning.parallel.children import memory_limit, status_of
from rlhf.tuning.parallel.messages import PIECE, Inbox, pack

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def loaded_code(target: str) -> dict[str, str]:
    """Return the SHA-256 of the source of each loaded module, and the version of each installed package, by name.

    target: `module:Class`; its module counts although it may not be loaded.
    """
    found = {}
    for name in {*sys.modules, target.partition(":")[0]} - {"__main__"}:
        if (code := _code_of(name)) is not None:
            found[name] = code
    return found


def difference(there: Mapping[str, str]) -> str | None:
    """Return a sentence on the first module or package that differs from that of this process; None if all agree."""
    for name, code in sorted(there.items()):
        if (own := _code_of(name)) != code:
            what = "is missing here" if own is None else f"is {own[:12]} here and {code[:12]} there"
            return f"{name} {what}: give the hosts the same code and packages"
    return None


def _code_of(name: str) -> str | None:
    module = sys.modules.get(name)
    try:
        spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
    except (AttributeError, ImportError, ValueError):
        return None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    if spec.origin.startswith(_INSTALLED):
        return None if "." in name else _version(name)
    try:
        return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    except OSError:
        return None


@functools.cache
def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


REASON_CHARACTERS = 500
"""Length to which the message of an error is cut."""


def target_of(name: str) -> Any:
    """Import the class `module:Class` that a pool names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def serve(stream: socket.socket, target: str, arguments: Mapping[str, Any], session: bool, folder: str) -> None:
    """Answer jobs until the stream ends; temporary files are below `folder`."""
    # Both: subprocesses read the environment, this process may have read it.
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    try:
        make = target_of(target)
        make.load(**arguments)
        handler = make(**arguments)
    # A module may raise anything as it is imported, SystemExit too.
    except BaseException as error:
        stream.sendall(pack({"refused": describe(error)}))
        return
    held, own = status_of("VmData"), os.getpid()
    with stream.makefile("rb") as jobs:
        for line in jobs:
            job = json.loads(line)
            # Its time begins: a round of long completions takes a while to arrive.
            stream.sendall(pack({"started": True}))
            number = {"job": job["job"]}
            # A session keeps what it allocates; a stateless job begins with what the process already holds.
            held = held if session else status_of("VmData")
            try:
                with memory_limit(held + job["megabytes"] * 1024):
                    answer = pack({**number, "value": handler(job["payload"])})
            except MemoryError:
                answer = pack({**number, "error": f"MemoryError: more than {job['megabytes']} MB"})
            # A user's code may raise anything, SystemExit and KeyboardInterrupt among them.
            except BaseException as error:
                answer = pack({**number, "error": describe(error)})
            if os.getpid() != own:
                # The job has forked: only the child itself answers and takes the next job.
                os._exit(1)
            stream.sendall(answer)
    handler.close()


def describe(error: BaseException) -> str:
    """Describe an exception in one line, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:REASON_CHARACTERS] + place


LOAD_SECONDS = 600
"""Longest time to import the target."""
TRIES = 3
"""How often a stateless job is given to a child, if children that have it are killed from outside."""
IDLE_SECONDS = 10.0
"""After so long without a job a stateless child is ended."""
LOOK_SECONDS = 1.0
"""Between two looks whether the owner is still the parent."""
# Signals by which the kernel (out of memory) or a person ends a process; code that crashes gets others.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_NEVER = float("inf")


def main(folder: str, descriptor: int, preload: bool = True) -> NoReturn:
    """Run a host with the settings in `folder` and the socket `descriptor`, which leads to its owner."""
    settings = json.loads(Path(folder, "settings.json").read_bytes())
    owner = socket.socket(fileno=descriptor)
    owner.set_inheritable(False)
    try:
        if preload:
            # An import that hangs ends this process by the alarm.
            signal.alarm(LOAD_SECONDS)
            target_of(settings["target"]).load(**settings["arguments"])
            signal.alarm(0)
        if children.status_of("Threads") > 1 and preload:
            # Threads do not survive a fork: each child imports the target for itself.
            owner.set_inheritable(True)
            *command, start = sys.orig_argv
            os.execv(sys.executable, [*command, start.removesuffix(")") + ", False)"])
        message: dict[str, Any] = {"ready": settings["processes"], "code": loaded_code(settings["target"])}
    # A module may raise anything as it is imported, SystemExit too.
    except BaseException as error:
        message = {"refused": describe(error)}
    status = 1
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            owner.sendall(pack(message))
            if "ready" in message:
                Host(owner, settings, folder).run()
        status = 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if status:
            traceback.print_exc()
        os._exit(status)


class _Child:
    """A forked process."""

    def __init__(self, pid: int, stream: socket.socket, folder: str, session: int | None) -> None:
        self.pid, self.stream, self.folder, self.session = pid, stream, folder, session
        self.inbox, self.unsent = Inbox(), memoryview(b"")
        self.job: dict[str, Any] | None = None
        """The job that it has; None while it waits for one."""
        self.started = self.leaving = False
        """Whether it has the target; whether it gets no further job, since it is killed or its stream has ended."""
        self.end_at = _NEVER
        """When it is killed: the deadline of its job, or the end of its idle time."""
        self.ended = ""
        """How it has ended; empty while it lives."""


class Host:
    """Forks children, gives them jobs, and ends them."""

    def __init__(self, owner: socket.socket, settings: dict[str, Any], folder: str) -> None:
        self._owner, self._inbox, self._folder = owner, Inbox(), folder
        self._settings = settings
        self._parent = os.getppid()
        self._waiting: deque[dict[str, Any]] = deque()
        """Stateless jobs that no child has."""
        self._children: dict[int, _Child] = {}
        self._sessions: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._wakes = socket.socketpair()

    def run(self) -> None:
        """Work until the owner is gone."""
        children.adopt_orphans()
        # A person's interrupt reaches the owner too, which decides what to end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The end of a child wakes the selector.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakes.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._owner, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        # What is loaded now is shared with children; a collection of theirs would copy it.
        gc.freeze()
        try:
            while self._turn():
                pass
        finally:
            for pid in self._children:
                children.kill(pid)
            children.kill_orphans()

    def _turn(self) -> bool:
        """Wait for events and act on them; False if the owner is gone."""
        nearest = min((child.end_at for child in self._children.values()), default=_NEVER)
        here = os.getppid() == self._parent
        for key, events in self._selector.select(max(0.0, min(nearest - time.monotonic(), LOOK_SECONDS))):
            if key.fileobj is self._owner:
                here = here and self._listen()
            elif key.fileobj is self._woken:
                self._woken.recv(PIECE)
            elif events & selectors.EVENT_WRITE:
                self._send(key.data)
            else:
                self._read(key.data)
        now = time.monotonic()
        for child in [child for child in self._children.values() if child.end_at <= now]:
            if child.job is not None and child.leaving:
                self._fail(child, "crash", "the process closed its stream")
            elif child.job is not None and not child.started:
                self._fail(child, "refused", f"not imported within {LOAD_SECONDS} s")
            elif child.job is not None:
                self._fail(child, "timeout", f"no answer within {child.job['seconds']:g} s")
            self._kill(child)
        self._reap()
        stateless = [child for child in self._children.values() if child.session is None]
        idle = [child for child in stateless if child.job is None and not child.leaving]
        while self._waiting and (idle or len(stateless) < self._settings["processes"]):
            job = self._waiting.popleft()
            if idle:
                self._give(idle.pop(), job)
            elif (forked := self._fork(job)) is not None:
                stateless.append(forked)
                self._give(forked, job)
        return here

    def _listen(self) -> bool:
        try:
            piece = self._owner.recv(PIECE)
        except OSError:
            return False
        for message in self._inbox.add(piece):
            if "job" in message:
                self._take_job(message)
            elif "end" in message:
                child = self._sessions.pop(message["end"], None)
                if child is not None and not child.ended:
                    self._end(child, message["seconds"])
            else:
                cancelled = set(message["cancel"])
                self._waiting = deque(job for job in self._waiting if job["job"] not in cancelled)
                for child in self._children.values():
                    if child.job is not None and child.job["job"] in cancelled:
                        self._end(child, 0.0)
        return bool(piece)

    def _take_job(self, job: dict[str, Any]) -> None:
        session = job["session"]
        if session is None:
            self._waiting.append(job)
            return
        child = self._fork(job) if job["first"] else self._sessions.get(session)
        if child is not None and child.leaving:
            how = child.ended or "it closed its stream"
            self._tell(job, failure="crash", message=f"the process has ended since its last answer: {how}")
        elif child is not None:
            self._sessions[session] = child
            self._give(child, job)

    def _fork(self, job: dict[str, Any]) -> _Child | None:
        host, streams = os.getpid(), list[socket.socket]()
        try:
            folder = tempfile.mkdtemp(dir=self._folder)
            streams += socket.socketpair()
            pid = os.fork()
        except OSError as error:
            # Too many processes or descriptors, no memory, a full disk: the next one may succeed.
            self._tell(job, failure="killed", message=f"the process was not forked: {error.strerror}")
            for stream in streams:
                stream.close()
            return None
        ours, theirs = streams
        if pid == 0:
            ours.close()
            self._become(host, theirs, folder, job["session"] is not None)
        theirs.close()
        ours.setblocking(False)
        child = self._children[pid] = _Child(pid, ours, folder, job["session"])
        self._selector.register(ours, selectors.EVENT_READ, child)
        return child

    def _become(self, host: int, stream: socket.socket, folder: str, session: bool) -> NoReturn:
        """Serve jobs in the forked process, without what is the host's."""
        status = 1
        try:
            # Before anything else: its group is what is killed.
            children.become_child(host)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            self._selector.close()
            self._wakes.close()
            serve(stream, self._settings["target"], self._settings["arguments"], session, folder)
            status = 0
        finally:
            os._exit(status)

    def _give(self, child: _Child, job: dict[str, Any]) -> None:
        """Give a child a job. The deadline runs from the moment at which it has read it."""
        child.job = job
        # A view: a send copies nothing. The child has a second for each megabyte to read it.
        child.unsent = memoryview(pack({"job": job["job"], "payload": job["payload"], "megabytes": job["megabytes"]}))
        seconds = job["seconds"] + len(child.unsent) / 1e6 if child.started else LOAD_SECONDS
        child.end_at = time.monotonic() + seconds
        self._send(child)

    def _send(self, child: _Child) -> None:
        """Send what the stream takes; the rest follows when it takes more."""
        with contextlib.suppress(BlockingIOError):
            try:
                child.unsent = child.unsent[child.stream.send(child.unsent) :]
            except (BrokenPipeError, ConnectionResetError):
                # `_reap` reports its end.
                child.unsent = memoryview(b"")
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.unsent else 0)
        self._selector.modify(child.stream, events, child)

    def _read(self, child: _Child) -> bool:
        """Take what a child has sent; False at the end of its stream, and if there is nothing now."""
        try:
            piece = child.stream.recv(PIECE)
            for message in child.inbox.add(piece):
                self._take_answer(child, message)
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        except (ValueError, RecursionError, TypeError) as error:
            self._fail(child, "crash", f"its answer cannot be read: {error}")
            self._kill(child)
            return False
        if not piece:
            self._selector.unregister(child.stream)
            child.stream.close()
            # `_reap` reports how it has ended, unless it lives on.
            child.leaving, child.end_at = True, min(child.end_at, time.monotonic() + LOOK_SECONDS)
        return bool(piece)

    def _take_answer(self, child: _Child, message: dict[str, Any]) -> None:
        if child.job is None:
            return
        if "started" in message:
            child.started = True
            child.end_at = time.monotonic() + child.job["seconds"]
            return
        if "refused" not in message and message.get("job") != child.job["job"]:
            # Of a job that has ended: a process that it forked has answered once more.
            return
        if "value" in message:
            self._tell(child.job, value=message["value"])
        else:
            kind = "error" if "error" in message else "refused"
            self._tell(child.job, failure=kind, message=str(message[kind]))
        child.job = None
        child.end_at = _NEVER if child.session is not None else time.monotonic() + IDLE_SECONDS

    def _fail(self, child: _Child, kind: str, message: str) -> None:
        if child.job is not None:
            self._tell(child.job, failure=kind, message=message)
            child.job = None

    def _tell(self, job: dict[str, Any], **answer: Any) -> None:
        with contextlib.suppress(OSError):
            self._owner.sendall(pack({"job": job["job"], **answer}))

    def _end(self, child: _Child, seconds: float) -> None:
        """End a child, after time to close its target if it is at rest."""
        seconds = seconds if child.job is None else 0.0
        child.job, child.leaving, child.end_at = None, True, time.monotonic() + seconds
        with contextlib.suppress(OSError):
            child.stream.shutdown(socket.SHUT_WR)
        if not seconds:
            self._kill(child)

    def _kill(self, child: _Child) -> None:
        child.leaving, child.end_at = True, _NEVER
        children.kill(child.pid)

    def _reap(self) -> None:
        """Take the answers of children that have ended, report jobs that have none, and kill what they have left."""
        ended = False
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended = True
                if child := self._children.pop(found[0], None):
                    self._bury(child, os.waitstatus_to_exitcode(found[1]))
        if ended:
            children.kill_orphans(self._children)

    def _bury(self, child: _Child, status: int) -> None:
        # Without adoption of orphans, the rest of its group is all that can be found.
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        while child.stream.fileno() >= 0 and self._read(child):
            pass
        if child.stream.fileno() >= 0:
            # Something that it has started holds the stream's other end.
            self._selector.unregister(child.stream)
            child.stream.close()
        shutil.rmtree(child.folder, ignore_errors=True)
        child.ended = children.ending(status)
        job = child.job
        if job is None:
            return
        job["tries"] -= 1
        if child.session is not None or -status not in _FROM_OUTSIDE:
            kind = "crash" if child.started else "refused"
            self._fail(child, kind, f"the process ended: {child.ended}")
        elif job["tries"]:
            # Not at once: what needs more memory than the others leave may find it at the end.
            self._waiting.append(job)
        else:
            reason = f"the process was killed {TRIES} times from outside ({child.ended}), probably for want of memory"
            self._fail(child, "killed", reason)

"""Lines between a run and its worker on another host, through two objects of the store that both see.

Each side writes one object and reads the other's. It holds the lines that the other side has not said it has seen, so
that nothing is lost while the store cannot be reached, and a beat, by which the other side knows that this one lives:

    {"id": "9f0c...", "beat": 7, "seen": 12, "lines": [[3, "..."], [4, "..."]], "closed": false}

Lines have numbers, of which `seen` is one more than the last that has arrived. `id` is drawn by each process: one that
takes the place of another knows nothing of what that one was told. A store that takes requests for seconds, or none for
minutes, delays lines and changes none.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections import deque
from typing import Any

from stages.store.artifacts import Store

POLL_SECONDS = 1.0
BEAT_SECONDS = 5.0
LONGEST_POLL_SECONDS = 5.0
"""A wait for the other side counts as this long at most: a process that was stopped has not waited."""
CLOSE_SECONDS = 30.0
"""For the store to take the last lines of a side that closes."""
UNSEEN = 64
"""Lines that have arrived, and are told of before the next beat."""
FOLDER = "mail"
RUN, WORKER = "run.json", "worker.json"
"""The objects of the two sides."""


class Replaced(RuntimeError):
    """Another process has taken the other side's place: it knows nothing of what was asked."""


class Mailbox:
    """One side. A thread of it writes and reads from `start` to `close`."""

    def __init__(self, store: Store, place: tuple[str, ...], mine: str):
        """place: parts of the folder's path in the store. mine: the object of this side, `RUN` or `WORKER`."""
        self._store, self._place = store, place
        self._mine, self._theirs = mine, WORKER if mine == RUN else RUN
        self._id, self._peer = uuid.uuid4().hex, ""
        self._changed = threading.Condition()
        self._lines = deque[tuple[int, str, bool]]()
        """What the other side has not seen: number, text, and whether a later line may take its place."""
        self._next = 0
        self._seen = self._told = 0
        self._arrived = deque[str]()
        self._beat, self._peer_beat = 0, -1
        self._silent = self._cut = 0.0
        self._look = "nothing"
        """What the last look found: `changed`, `same`, or `nothing` where the store did not answer."""
        self._heard = 0
        """How many lines of this side the other one says it has seen."""
        self.fault = ""
        """Why the store could not be read, where the last look failed."""
        self._dirty = self._closing = self._left = self._replaced = False
        """Whether there is something to write, nothing more comes, the other side can read so, and it is another."""
        self._until = 0.0
        self.closed = False
        """Whether the other side sends nothing more."""
        self._thread = threading.Thread(target=self._work, name="mailbox", daemon=True)

    def exists(self, name: str) -> bool:
        """Whether a side, `RUN` or `WORKER`, has written."""
        return bool(self._store.fs.exists(self._store.join(*self._place, name)))

    def start(self) -> None:
        """Writes for the first time, and goes on in a thread. Raises what the store does."""
        self._write()
        self._thread.start()

    def send(self, line: str, passing: bool = False) -> int:
        """Sends a line, whose number it returns. passing: as progress is: the next passing one takes its place where
        it was not seen."""
        with self._changed:
            if passing and self._lines and self._lines[-1][2]:
                self._lines.pop()
            # With a number of its own: the other side may have seen the one before just now.
            self._lines.append((self._next, line, passing))
            self._next += 1
            self._dirty = True
            self._changed.notify_all()
            return self._next - 1

    def has_seen(self, number: int) -> bool:
        """Whether the other side says that it has seen a line of this one."""
        return self._heard > number

    def receive(self, seconds: float) -> str | None:
        """The next line of the other side; None where there is none for so long. Raises Replaced."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._replaced, seconds)
            if self._replaced:
                raise Replaced("another process has taken the place of the one that was asked")
            return self._arrived.popleft() if self._arrived else None

    @property
    def silent(self) -> float:
        """For how many seconds the other side has not changed its object, as far as this side could read it."""
        return self._silent

    @property
    def cut(self) -> float:
        """For how many seconds this side could not read the store."""
        return self._cut

    def leave(self, seconds: float = 0.0) -> None:
        """Says that nothing more comes, behind what was sent; goes on reading for so long, until the other side has
        closed too."""
        with self._changed:
            self._until = time.monotonic() + seconds
            self._closing = True
            self._changed.notify_all()

    def close(self, seconds: float = 0.0) -> bool:
        """As `leave`; whether the other side has closed too, for which it waits so long."""
        self.leave(seconds)
        if self._thread.is_alive():
            self._thread.join(seconds + CLOSE_SECONDS + LONGEST_POLL_SECONDS)
        return self.closed

    def remove(self) -> None:
        """Removes both objects, when both sides have closed."""
        # What stays is collected.
        with contextlib.suppress(Exception):
            self._store.remove_folder(self._store.join(*self._place))

    def _work(self) -> None:
        wrote = looked = time.monotonic()
        while True:
            began = time.monotonic()
            with self._changed:
                self._changed.wait_for(self._is_new, POLL_SECONDS)
                new, closing = self._is_new(), self._closing
            if new or time.monotonic() - wrote >= BEAT_SECONDS:
                # What cannot be written now is written in a moment. A request that is cancelled is no end either.
                with contextlib.suppress(BaseException):
                    self._write()
                    wrote, self._left = time.monotonic(), closing
            try:
                self._read()
                self.fault = ""
            except BaseException as e:
                self.fault = f"{type(e).__name__}: {e}"
            now = time.monotonic()
            waited, looked = min(now - looked, LONGEST_POLL_SECONDS), now
            self._silent, self._cut = self._counted(waited)
            if self._left and (self.closed or now >= self._until):
                return
            if closing and now >= self._until + CLOSE_SECONDS:
                return
            # Stores limit how often one object is written.
            time.sleep(max(POLL_SECONDS / 4, POLL_SECONDS - (time.monotonic() - began) if wrote >= began else 0.0))

    def _is_new(self) -> bool:
        return self._dirty or (self._closing and not self._left) or self._seen - self._told >= UNSEEN

    def _counted(self, waited: float) -> tuple[float, float]:
        """How long the other side is silent and the store cut off, by the last look."""
        found, self._look = self._look, "nothing"
        match found:
            case "changed":
                return 0.0, 0.0
            case "same":
                return self._silent + waited, 0.0
        # Who cannot look knows nothing of the other side.
        return self._silent, self._cut + waited

    def _write(self) -> None:
        with self._changed:
            self._beat += 1
            lines = [[number, line] for number, line, _ in self._lines]
            said = {"id": self._id, "beat": self._beat, "seen": self._seen, "lines": lines, "closed": self._closing}
            self._told, self._dirty = self._seen, False
        try:
            self._store.write_bytes(json.dumps(said).encode(), *self._place, self._mine)
        except BaseException:
            self._dirty = True
            raise

    def _read(self) -> None:
        said: Any = self._store.read_json(*self._place, self._theirs)
        if said is None or (said["id"], said["beat"]) == (self._peer, self._peer_beat):
            self._look = "same"
            return
        with self._changed:
            # A run that goes on elsewhere closes the mailboxes of its last try: that is no other's word.
            self._replaced |= self._peer not in ("", said["id"]) and not said["closed"]
            self._peer, self._peer_beat, self._look = said["id"], said["beat"], "changed"
            for number, line in said["lines"] if not self._replaced else ():
                if number >= self._seen:
                    self._seen = number + 1
                    self._arrived.append(line)
            self._heard = said["seen"]
            while self._lines and self._lines[0][0] < said["seen"]:
                self._lines.popleft()
            self.closed = said["closed"]
            self._changed.notify_all()


def close_others(store: Store, run: str, work: str) -> list[tuple[str, ...]]:
    """Closes the mailboxes of a run's worker of this name which an earlier try has left, for the run; their places."""
    places: list[tuple[str, ...]] = [
        (FOLDER, run, name) for name in store.names(FOLDER, run) if name.rpartition("-")[0] == work
    ]
    said = {"id": uuid.uuid4().hex, "beat": 0, "seen": 0, "lines": [], "closed": True}
    for place in places:
        store.write_json(said, *place, RUN)
    return places


def is_left(store: Store, place: tuple[str, ...]) -> bool:
    """Whether the worker of a mailbox has closed it, or has never been there."""
    said = store.read_json(*place, WORKER)
    return said is None or bool(said["closed"])

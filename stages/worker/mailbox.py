"""Lines between a run and its worker on another host, through two objects of the store that both see.

Each side writes one object and reads the other's. It holds the lines that the other side has not said it has seen, so
that nothing is lost while the store cannot be reached, and a beat, by which the other side knows that this one lives:

    {"beat": 7, "seen": 12, "first": 3, "lines": ["...", "..."], "closed": false}

`first` is the number of the first line, `seen` how many of the other side's lines have arrived. A store that takes
requests for seconds, or none for minutes, delays lines and changes none.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from typing import Any

from stages.store.artifacts import Store

POLL_SECONDS = 1.0
BEAT_SECONDS = 5.0
LONGEST_POLL_SECONDS = 30.0
"""A wait for the other side counts as this long at most: a process that was stopped has not waited."""
GRACE_SECONDS = 5.0
"""For a request that is under way."""
UNSEEN = 64
"""Lines that have arrived, and are told of before the next beat."""
RUN, WORKER = "run.json", "worker.json"
"""The objects of the two sides."""


class Mailbox:
    """One side. A thread of it writes and reads from `start` to `close`."""

    def __init__(self, store: Store, place: tuple[str, ...], mine: str):
        """place: parts of the folder's path in the store. mine: the object of this side, `RUN` or `WORKER`."""
        self._store, self._place = store, place
        self._mine, self._theirs = mine, WORKER if mine == RUN else RUN
        self._changed = threading.Condition()
        self._first = 0
        self._lines = deque[tuple[str, bool]]()
        """What the other side has not seen, and whether a later line may take its place."""
        self._seen = self._told = 0
        self._arrived = deque[str]()
        self._beat, self._peer_beat = 0, -1
        self._silent = 0.0
        self._dirty = self._closing = self._left = False
        """Whether there is something to write, nothing more comes, and the other side can read so."""
        self._until = 0.0
        self.closed = False
        """Whether the other side sends nothing more."""
        self._thread = threading.Thread(target=self._work, name="mailbox", daemon=True)

    def exists(self) -> bool:
        """Whether the other side has written."""
        return bool(self._store.fs.exists(self._store.join(*self._place, self._theirs)))

    def start(self) -> None:
        """Writes for the first time, and goes on in a thread. Raises what the store does."""
        self._write()
        self._thread.start()

    def send(self, line: str, passing: bool = False) -> None:
        """Sends a line. passing: as progress is: the next passing one takes its place where it was not seen."""
        with self._changed:
            if passing and self._lines and self._lines[-1][1]:
                # Its number stays: the other side may have seen it just now.
                self._lines[-1] = ("", False)
            self._lines.append((line, passing))
            self._dirty = True
            self._changed.notify_all()

    def receive(self, seconds: float) -> str | None:
        """The next line of the other side; None where there is none for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived, seconds)
            return self._arrived.popleft() if self._arrived else None

    @property
    def silent(self) -> float:
        """For how many seconds the other side has not changed its object, as far as this side could look."""
        return self._silent

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
            self._thread.join(seconds + LONGEST_POLL_SECONDS + GRACE_SECONDS)
        return self.closed

    def remove(self) -> None:
        """Removes both objects, when both sides have closed."""
        # What stays goes with the run's record.
        with contextlib.suppress(Exception):
            self._store.remove_folder(self._store.join(*self._place))

    def _work(self) -> None:
        wrote = looked = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._dirty or (self._closing and not self._left), POLL_SECONDS)
                new = self._dirty or (self._closing and not self._left) or self._seen - self._told >= UNSEEN
                closing = self._closing
            if new or time.monotonic() - wrote >= BEAT_SECONDS:
                # What cannot be written now is written in a moment.
                with contextlib.suppress(Exception):
                    self._write()
                    wrote, self._left = time.monotonic(), closing
            now = time.monotonic()
            with contextlib.suppress(Exception):
                self._read(min(now - looked, LONGEST_POLL_SECONDS))
            looked = now
            if self._left and (self.closed or now >= self._until):
                return
            if closing and now >= self._until + LONGEST_POLL_SECONDS:
                return
            time.sleep(POLL_SECONDS / 4)

    def _write(self) -> None:
        with self._changed:
            self._beat += 1
            lines = [line for line, _ in self._lines]
            said = {"beat": self._beat, "seen": self._seen, "first": self._first, "lines": lines}
            said["closed"] = self._closing
            self._told, self._dirty = self._seen, False
        try:
            self._store.write_bytes(json.dumps(said).encode(), *self._place, self._mine)
        except BaseException:
            self._dirty = True
            raise

    def _read(self, waited: float) -> None:
        self._silent += waited
        said: Any = self._store.read_json(*self._place, self._theirs)
        if said is None or said["beat"] == self._peer_beat:
            return
        with self._changed:
            self._peer_beat, self._silent = said["beat"], 0.0
            for number, line in enumerate(said["lines"], said["first"]):
                if number >= self._seen:
                    self._seen = number + 1
                    if line:
                        self._arrived.append(line)
            while self._lines and self._first < said["seen"]:
                self._lines.popleft()
                self._first += 1
            self.closed = said["closed"]
            self._changed.notify_all()

"""The record of a run as it is written while the run goes on."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
import weakref
from typing import Any

from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.runs import Recorder

SAVE_SECONDS = 2.0
"""A record with something new is written within this time; a collection waits longer (`rlhf.stages.store.collect`)."""
SIGN_SECONDS = 60.0
"""A record without anything new is written this often: other hosts see by it that the run is alive."""


def now() -> str:
    """The present moment as a record has it: ISO 8601 in UTC, with milliseconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


class Saver:
    """Writes a record that several threads change; one of its own writes it while all of them wait for something."""

    def __init__(self, store: Store, record: dict[str, Any], lock: threading.RLock):
        """lock: of the record."""
        self._record, self._lock = record, lock
        self._recorder = Recorder(store, record["name"])
        self._saved, self._is_new = 0.0, False
        self._ended = threading.Event()
        # A session that is dropped without an end leaves no thread.
        weakref.finalize(self, self._ended.set)
        threading.Thread(target=_keep_saved, args=[weakref.ref(self), self._ended], daemon=True).start()

    def save(self, soon: bool = False) -> None:
        """Writes the record.

        soon: not if it was written in the last `SAVE_SECONDS`; it is written after them.
        """
        with self._lock:
            self._is_new = True
            if soon and time.monotonic() - self._saved < SAVE_SECONDS:
                return
            self._saved = time.monotonic()
            self._record["saved"] = now()
            self._recorder.write(self._record)
            self._is_new = False

    def save_if_due(self) -> None:
        """Writes the record if it has something new or is silent for long. The next save repeats what fails."""
        with self._lock, contextlib.suppress(Exception):
            due = self._is_new or time.monotonic() - self._saved > SIGN_SECONDS
            if due and not self._ended.is_set():
                self.save()

    def end(self) -> None:
        """Leaves all further saves to the caller."""
        self._ended.set()


def _keep_saved(saver: weakref.ref[Saver], ended: threading.Event) -> None:
    while not ended.wait(SAVE_SECONDS):
        known = saver()
        if known is None:
            return
        known.save_if_due()
        del known

"""Writes the record of a running run."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from typing import Any

from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.runs import Recorder

SAVE_SECONDS = 2.0
"""A changed record is written within this time; a garbage collection waits longer (`rlhf.stages.store.collect`)."""
SIGN_SECONDS = 60.0
"""An unchanged record is written this often, as a sign of life for other hosts."""


def now() -> str:
    """Return the time in ISO 8601, in UTC, with milliseconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


class Saver:
    """Writes a record that several threads change; a thread writes it while all of them wait for something."""

    def __init__(self, store: Store, record: dict[str, Any], lock: threading.RLock):
        """lock: of the record."""
        self._record, self._lock = record, lock
        self._recorder = Recorder(store, record["name"])
        self._saved, self._is_new = 0.0, False
        self._ended = threading.Event()
        threading.Thread(target=self._keep_saved, daemon=True).start()

    def save(self, soon: bool = False) -> None:
        """Write the record.

        soon: a record that was written in the last `SAVE_SECONDS` is written after them.
        """
        with self._lock:
            self._is_new = True
            if soon and time.monotonic() - self._saved < SAVE_SECONDS:
                return
            self._saved = time.monotonic()
            self._record["saved"] = now()
            self._recorder.write(self._record)
            self._is_new = False

    def end(self) -> None:
        """Leave all further saves to the caller."""
        self._ended.set()

    def _keep_saved(self) -> None:
        while not self._ended.wait(SAVE_SECONDS):
            # The next save repeats a failed one.
            with self._lock, contextlib.suppress(Exception):
                due = self._is_new or time.monotonic() - self._saved > SIGN_SECONDS
                if due and not self._ended.is_set():
                    self.save()

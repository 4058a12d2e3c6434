"""The time that a run may take."""

from __future__ import annotations

import datetime
import time

from flows.report.formats import duration, when


class RunTooLong(RuntimeError):
    """A run has taken longer than `limits.run_seconds`; what is finished is kept."""


class RunLimit:
    """The limit of one run, from its beginning, by the clock; and what the run is at."""

    def __init__(self, run: str, seconds: float | None):
        self._run, self._seconds = run, seconds
        self._began = self._since = time.monotonic()
        self._what = "nothing yet"
        self._at = datetime.datetime.now(datetime.UTC)

    def at(self, what: str) -> None:
        """Notes what the run is at from now on. Raises RunTooLong where its time is over."""
        self._what, self._since, self._at = what, time.monotonic(), datetime.datetime.now(datetime.UTC)
        self.check()

    def waits(self, line: str) -> None:
        """Notes that it waits for another process, as the line says."""
        self._what += f" ({line})"

    def check(self) -> None:
        """Raises RunTooLong where the run has had its time: what was at work, since when, and what to type."""
        now = time.monotonic()
        if self._seconds is None or now - self._began <= self._seconds:
            return
        raise RunTooLong(
            f"run {self._run} took longer than its {duration(self._seconds)} (`limits.run_seconds`): it was at "
            f"{self._what}, since {when(self._at.isoformat())} ({duration(now - self._since)}). The same command goes "
            f"on from there (with --name {self._run} under this name), and --set limits.run_seconds=null gives it any "
            "time"
        )

"""The time that a run may take."""

from __future__ import annotations

import dataclasses
import datetime
import time

from rlhf.flows.report.formats import duration, when


class RunTooLong(RuntimeError):
    """A run has taken longer than `limits.run_seconds`; what is finished is kept."""


@dataclasses.dataclass
class _At:
    """A stage that the run is at."""

    what: str
    since: float
    """By `time.monotonic`."""
    began: datetime.datetime

    def told(self, now: float) -> str:
        return f"{self.what}, since {when(self.began.isoformat())} ({duration(now - self.since)})"


class RunLimit:
    """The limit of one run, from its beginning, by the clock; and which stages the run is at."""

    def __init__(self, run: str, seconds: float | None):
        self._run, self._seconds = run, seconds
        self._began = time.monotonic()
        self._at: dict[str, _At] = {}

    def at(self, stage: str) -> None:
        """Notes a stage that the run is at from now on. Raises RunTooLong where its time is over."""
        self._at[stage] = _At(stage, time.monotonic(), datetime.datetime.now(datetime.UTC))
        self.check()

    def left(self, stage: str) -> None:
        """Notes that it is not at this stage any more."""
        self._at.pop(stage, None)

    def waits(self, stage: str, line: str) -> None:
        """Notes that a stage waits for another process, as the line says."""
        if stage in self._at:
            self._at[stage].what += f" ({line})"

    def check(self) -> None:
        """Raises RunTooLong where the run has had its time: what was at work, since when, and what to type."""
        now = time.monotonic()
        if self._seconds is None or now - self._began <= self._seconds:
            return
        # A copy: other threads begin stages.
        at = " and ".join(stage.told(now) for stage in list(self._at.values())) or "no stage yet"
        raise RunTooLong(
            f"run {self._run} took longer than its {duration(self._seconds)} (`limits.run_seconds`): it was at {at}. "
            f"The same command goes on from there (with --name {self._run} under this name), and "
            "--set limits.run_seconds=null gives it any time"
        )

"""A worker on another host than its run: it takes requests from a mailbox of the store, and answers there.

run                                             this process
                                <----------       {"hello"}: host and process, once
  {"request", "same", ...}      ---------->       one stage at a time, by a worker process of this host
                                <----------       events, as those of any worker (`stages.worker.protocol`)
  closed                        ---------->       it leaves
                                <----------       {"idle"}: it leaves, since nothing was asked for long
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

from stages.store.artifacts import Store
from stages.worker import mailbox, sameness
from stages.worker.client import CodeChanged, StageFailed, StageOutage, Worker, WorkerDied
from stages.worker.mailbox import Mailbox
from stages.worker.protocol import Changed, Done, Event, Failed, Heartbeat, Lost, Progress, Report, Request, event_line

LOG_BYTES = 1 << 22
"""The end of its log that the store gets."""
LOG_SECONDS = 30.0
"""How often it does."""
CUT = 12
"""A stage that computes goes on while the store cannot be reached for so many times the silence."""


class RunGone(RuntimeError):
    """The run for which this worker is here has ended, or cannot be heard."""


def serve(store: Store, place: tuple[str, ...], log: Path, silence: float, idle: float | None) -> None:
    """Makes what a run asks for, until that closes its mailbox, or has asked for nothing for `idle` seconds.

    place: of the mailbox in the store. log: file of the worker's output on this host, which a remote store gets beside
    the record of the run. silence: seconds without a beat of the run after which it counts as gone.
    Raises RunGone where it is, where the store is another one than the run's, and where the mailbox had a worker.
    """
    box = Mailbox(store, place, mailbox.WORKER)
    if not box.exists(mailbox.RUN):
        raise RunGone(
            f"{store.shown} has no {'/'.join(place)} as {socket.gethostname()} sees it: its run has ended, or is on "
            "another store: a run and its workers in pools need one that all of their hosts see, such as s3://BUCKET/PATH"
        )
    if box.exists(mailbox.WORKER):
        # What was asked of that one is not known here; the run asks for another.
        raise RunGone(f"{'/'.join(place)} had a worker already: a flow run of a pool is not started again")
    _Away(store, box, log, silence, idle).serve()


class _Away:
    def __init__(self, store: Store, box: Mailbox, log: Path, silence: float, idle: float | None):
        self._store, self._box, self._silence, self._idle = store, box, silence, idle
        self._worker = Worker(log)
        self._here = sameness.of_this_host()
        """As it was when this process began: what is edited later is in no process of it."""
        self._over = threading.Event()
        self._copies = threading.Thread(target=self._store_logs, name="log-copy", daemon=True)

    def serve(self) -> None:
        """See `serve` above."""
        self._box.start()
        self._box.send(json.dumps({"hello": {"host": socket.gethostname(), "pid": os.getpid()}}))
        self._copies.start()
        idle = 0.0
        try:
            while not self._box.closed and (self._idle is None or idle < self._idle):
                line = self._box.receive(1.0)
                if line is None:
                    idle += 1.0
                    self._check_silence(self._silence)
                    continue
                idle = 0.0
                asked = json.loads(line)
                self._idle = asked["idle"]
                outcome = self._outcome(asked)
                if outcome is not None:
                    self._box.send(event_line(outcome))
            if not self._box.closed:
                self._box.send(json.dumps({"idle": self._idle}))
        finally:
            # What was sent is there before the rest of the end takes its time.
            self._box.close()
            self._worker.close()
            self._over.set()
            self._copies.join(LOG_SECONDS)

    def _outcome(self, asked: dict[str, Any]) -> Event | None:
        """What a request ends with; None where nobody waits for it any more."""
        try:
            there, limits = asked["same"], asked["limits"]
            # Before the request is read: of another commit it may have other fields.
            if other := sameness.difference(there, self._here, asked["computes"], asked["other_kind"]):
                return Failed(other, "")
            self._worker.stall_seconds, self._worker.stage_seconds = limits
            request = Request.parse(json.dumps(asked["request"]))
            return Done(self._worker.run(request, self._send, self._check))
        except CodeChanged as e:
            return Changed(str(e))
        except StageFailed as e:
            return Failed(str(e), "", isinstance(e, StageOutage))
        except WorkerDied as e:
            return Lost(str(e))
        except OSError as e:
            # Such as a disk that has no room for the log of the process that would be started.
            return Failed(f"{type(e).__name__}: {e}", "", outage=True)
        except RunGone:
            if self._box.closed:
                return None
            raise
        except Exception as e:
            return Failed(f"{type(e).__name__}: {e}", "")

    def _send(self, event: Report) -> None:
        self._box.send(event_line(event), passing=isinstance(event, Progress | Heartbeat))

    def _check(self) -> None:
        """Raises RunGone where the run has closed its mailbox, or is silent."""
        if self._box.closed:
            raise RunGone("the run has ended")
        self._check_silence(CUT * self._silence)

    def _check_silence(self, cut: float) -> None:
        if self._box.silent > self._silence:
            raise RunGone(
                f"the run has been silent for {self._silence:g} s: its host has ended, or is cut off from the store; "
                "what is finished is kept, and the run asks for a worker again"
            )
        if self._box.cut > cut:
            raise RunGone(f"{self._store.shown} could not be reached from {socket.gethostname()} for {cut:g} s")

    def _store_logs(self) -> None:
        """Copies the log to a remote store, so that `rlhf logs` has it on any machine: beside the stages, since a store
        may take its time."""
        stored = -1
        while not self._store.is_local:
            over = self._over.wait(LOG_SECONDS)
            # A log must not fail a stage.
            with contextlib.suppress(Exception):
                log = self._worker.log
                size = log.stat().st_size
                if size != stored:
                    with log.open("rb") as file:
                        file.seek(max(0, size - LOG_BYTES))
                        self._store.write_bytes(file.read(LOG_BYTES), "runs", log.parent.name, log.name)
                    stored = size
            if over:
                return

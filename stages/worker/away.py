"""A worker on another host than its run: it takes requests from a mailbox of the store, and answers there.

run                                       this process
  {"request", "limits"}   ---------->       one stage at a time, by a worker process of this host
                          <----------       {"hello"}: host, process and device, once
                          <----------       events, as those of any worker (`stages.worker.protocol`)
  closed                  ---------->       it leaves
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path

from stages.store.artifacts import Store
from stages.worker import mailbox
from stages.worker.client import CodeChanged, StageFailed, StageOutage, Worker, WorkerDied
from stages.worker.devices import device_kind
from stages.worker.mailbox import Mailbox
from stages.worker.protocol import Changed, Done, Event, Failed, Heartbeat, Lost, Progress, Report, Request, event_line

LOG_BYTES = 1 << 24
"""The end of its log that the store gets."""
LOG_SECONDS = 30.0
"""How often it does while a stage is at work."""


class RunGone(RuntimeError):
    """The run for which this worker is here has ended, or cannot be heard."""


def serve(store: Store, place: tuple[str, ...], log: Path, silence: float) -> None:
    """Makes what a run asks for, until that closes its mailbox.

    place: of the mailbox in the store. log: file of the worker's output on this host, which a remote store gets beside
    the record of the run. silence: seconds without a beat of the run after which it counts as gone.
    Raises RunGone where it is, or where the store is another one than the run's.
    """
    box = Mailbox(store, place, mailbox.WORKER)
    if not box.exists():
        raise RunGone(
            f"{store.shown} has no {'/'.join(place)} as {socket.gethostname()} sees it: a run and its workers in other "
            "pools need one store that all of their hosts see, such as s3://BUCKET/PATH"
        )
    _Away(store, box, log, silence).serve()


class _Away:
    def __init__(self, store: Store, box: Mailbox, log: Path, silence: float):
        self._store, self._box, self._silence = store, box, silence
        self._worker = Worker(log)
        self._stored, self._stored_bytes = time.monotonic(), -1

    def serve(self) -> None:
        """See `serve` above."""
        self._box.start()
        hello = {"host": socket.gethostname(), "pid": os.getpid(), "device": device_kind()}
        self._box.send(json.dumps({"hello": hello}))
        try:
            while not self._box.closed:
                line = self._box.receive(1.0)
                if line is None:
                    self._check_silence()
                    continue
                asked = json.loads(line)
                self._worker.stall_seconds, self._worker.stage_seconds = asked["limits"]
                outcome = self._outcome(Request.parse(json.dumps(asked["request"])))
                self._store_log()
                if outcome is not None:
                    self._box.send(event_line(outcome))
        finally:
            self._worker.close()
            self._store_log()
            self._box.close()

    def _outcome(self, request: Request) -> Event | None:
        """What a request ends with; None where nobody waits for it any more."""
        try:
            return Done(self._worker.run(request, self._send, self._check))
        except CodeChanged as e:
            return Changed(str(e))
        except StageFailed as e:
            return Failed(str(e), "", isinstance(e, StageOutage))
        except WorkerDied as e:
            return Lost(str(e))
        except RunGone:
            if self._box.closed:
                return None
            raise

    def _send(self, event: Report) -> None:
        self._box.send(event_line(event), passing=isinstance(event, Progress | Heartbeat))

    def _check(self) -> None:
        """Raises RunGone where the run has closed its mailbox, or is silent."""
        if self._box.closed:
            raise RunGone("the run has ended")
        self._check_silence()
        if time.monotonic() - self._stored > LOG_SECONDS:
            self._store_log()

    def _check_silence(self) -> None:
        if self._box.silent > self._silence:
            raise RunGone(
                f"the run has been silent for {self._silence:g} s: its host has ended, or {self._store.shown} cannot "
                "be reached from one of the two; what is finished is kept, and the run asks for a worker again"
            )

    def _store_log(self) -> None:
        """Copies the log to a remote store, so that `rlhf logs` has it on any machine."""
        self._stored = time.monotonic()
        log = self._worker.log
        # A log must not fail a stage.
        with contextlib.suppress(Exception):
            size = log.stat().st_size
            if self._store.is_local or size == self._stored_bytes:
                return
            with log.open("rb") as file:
                file.seek(max(0, size - LOG_BYTES))
                self._store.write_bytes(file.read(LOG_BYTES), "runs", log.parent.name, log.name)
            self._stored_bytes = size

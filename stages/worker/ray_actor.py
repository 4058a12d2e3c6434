"""The Ray actor that holds the worker of one host: the same worker process as without a cluster.

`rlhf.flows.running.cluster` creates it and polls it. Ray repeats a call that a broken connection may have lost, so each
call here has the same effect when it arrives twice.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

from rlhf.stages.worker import host_compat, interpreter
from rlhf.stages.worker.client import CodeChanged, StageFailed, Worker, WorkerDied
from rlhf.stages.worker.protocol import Done, Report, Request

POLL_SECONDS = 1.0
"""How long a poll waits for news."""
LOG_BYTES = 1 << 20
"""The most that one poll returns of the log."""


class HostWorker:
    """The worker of one host."""

    def __init__(self, name: str, stage_seconds: float | None):
        """name: of the log. stage_seconds: how long a stage may take."""
        # Ray sets it to the number of reserved processors: the worker uses the threads that it uses without Ray.
        os.environ.pop("OMP_NUM_THREADS", None)
        interpreter.add_current_folder()
        self._worker = Worker(interpreter.PROJECT / f"{name}-{os.getpid()}.log", None, stage_seconds)
        self._number = -1
        self._events: list[Report | Done | Exception] = []
        self._read = 0
        """Number of events that the run has received; `_events` begins after them."""
        self._news = threading.Condition()
        self._thread = threading.Thread()

    def describe(self, kind: str, store: str) -> dict[str, Any]:
        """Names and properties of this host. kind: of device, PLATFORM:KIND. store: a folder of it."""
        import ray
        from ray._private.authentication.authentication_utils import is_token_auth_enabled

        return {
            "host": socket.gethostname(),
            "address": ray.util.get_node_ip_address(),
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "log": str(self._worker.log),
            "store": Path(store).is_dir(),
            "token": is_token_auth_enabled(),
            "properties": host_compat.properties(kind),
        }

    def free_port(self, address: str) -> int:
        """A port of this host that nothing uses at the moment."""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])

    def set_environment(self, variables: dict[str, str]) -> None:
        """Sets variables of the worker process that the first stage starts."""
        self._worker.variables = variables

    def begin(self, number: int, request: Request) -> None:
        """Starts a stage. number: of the request; one more with each."""
        if number <= self._number:
            return
        self._number, self._events, self._read = number, [], 0
        self._thread = threading.Thread(target=self._run, args=(request,), daemon=True)
        self._thread.start()

    def poll(self, number: int, read: int, offset: int) -> tuple[list[Report | Done | Exception], bytes]:
        """The events of a request after the first `read`, for which it waits a moment; the log after `offset` bytes.

        The last event of a stage is Done or an error of `Worker.run`.
        """
        with self._news:
            if number != self._number:
                # A call that arrives late: nobody reads its answer.
                return [], b""
            if read > self._read:
                del self._events[: read - self._read]
                self._read = read
            self._news.wait_for(lambda: self._events, POLL_SECONDS)
            events = list(self._events)
        if not self._worker.log.exists():
            return events, b""
        with self._worker.log.open("rb") as log:
            log.seek(offset)
            return events, log.read(LOG_BYTES)

    def write_stacks(self) -> None:
        """Has the worker write the stacks of its threads to its log."""
        self._worker.write_stacks()

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()

    def _run(self, request: Request) -> None:
        try:
            self._add(Done(self._worker.run(request, self._add)))
        except (StageFailed, WorkerDied, CodeChanged) as e:
            self._add(e)
        except Exception as e:
            self._add(StageFailed(f"{type(e).__name__}: {e}"))

    def _add(self, event: Report | Done | Exception) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify_all()

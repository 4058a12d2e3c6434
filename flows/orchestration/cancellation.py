"""The end of a run in Prefect: its cancellation there, and a server that stopped answering."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from httpx import HTTPStatusError, Timeout
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas import StateType
from prefect.context import SyncClientContext, refresh_global_settings_context
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from rlhf.flows.orchestration.display import short_client
from rlhf.flows.orchestration.exit import leave_soon

ASK_SECONDS = 5.0
"""Limit of one health check."""
BEGIN_SECONDS = 8.0
"""Limit for a server to answer before a run begins: two health checks."""
END_SECONDS = 30.0
"""Limit for a server to answer at the end of a run; a private one may be restarting."""
DRAIN_SECONDS = 5.0
"""Limit for sending events, and for logs."""

CANCEL_SECONDS = 5.0
"""Pause between two checks for a cancellation."""


class Cancellation:
    """Watches the server for a cancellation of this flow run, and then calls `stop`.

    Prefect's workers end their flow runs by a signal; `rlhf run` gets none.
    """

    def __init__(self, stop: Callable[[], None]):
        self._stop, self._flow_run = stop, runtime.flow_run.id
        self._asked, self._over = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="cancellation", daemon=True).start()

    def is_asked(self) -> bool:
        """Whether the flow run was cancelled."""
        return self._asked.is_set()

    def end(self) -> None:
        """Stop watching."""
        self._over.set()

    def _watch(self) -> None:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), short_client() as client:
            while not self._over.wait(CANCEL_SECONDS):
                # Try again if the server does not answer.
                with contextlib.suppress(Exception):
                    state = client.read_flow_run(self._flow_run).state
                    if state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED):
                        self._asked.set()
                        self._stop()
                        return


def answer_error(seconds: float) -> Exception | None:
    """Check the server's health until it answers or `seconds` are over; return the last error, None after an answer."""
    deadline = time.monotonic() + seconds
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings={"timeout": ASK_SECONDS}, sync_client=True) as client,
    ):
        while True:
            error = client.api_healthcheck()
            # Any answer will do.
            if error is None or isinstance(error, HTTPStatusError):
                return None
            if time.monotonic() >= deadline:
                return error
            time.sleep(0.5)


def give_up_soon() -> None:
    """Shorten the waits of the flow's client if the server does not answer.

    Call it inside a flow that is about to end: Prefect tries for minutes to report the end.
    """
    context = SyncClientContext.get()
    if context is None or answer_error(END_SECONDS) is None:
        return
    context.client._client.timeout = Timeout(ASK_SECONDS)
    os.environ["PREFECT_CLIENT_MAX_RETRIES"] = "0"
    refresh_global_settings_context()


def send_events() -> None:
    """Send the events and logs that Prefect's client still holds."""
    for worker in (EventsWorker, APILogWorker):
        waited = worker.drain_all(timeout=DRAIN_SECONDS)
        # Outside of an event loop: a pair of done and pending futures.
        if isinstance(waited, tuple) and waited[1]:
            leave_soon()

"""The end of a run in Prefect: its cancellation there, and a server that does not answer any more."""

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
"""For the answer to one question whether a server is well."""
BEGIN_SECONDS = 8.0
"""For a server to answer before a run is begun on it: two questions."""
END_SECONDS = 30.0
"""For a server to answer at the end of a run: a private one that has died is started again meanwhile."""
DRAIN_SECONDS = 5.0
"""For events, and for logs, to be sent."""

CANCEL_SECONDS = 5.0
"""Between two questions whether the flow run is being cancelled."""


class Cancellation:
    """Asks the server whether somebody cancels this flow run, and then calls `stop`.

    Prefect ends the flow runs of its workers by a signal; nobody sends one to a flow run of `rlhf run`.
    """

    def __init__(self, stop: Callable[[], None]):
        self._stop, self._flow_run = stop, runtime.flow_run.id
        self._asked, self._over = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="cancellation", daemon=True).start()

    def is_asked(self) -> bool:
        """Whether somebody has cancelled the flow run."""
        return self._asked.is_set()

    def end(self) -> None:
        """Asks no more."""
        self._over.set()

    def _watch(self) -> None:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), short_client() as client:
            while not self._over.wait(CANCEL_SECONDS):
                # A server that is away is asked again.
                with contextlib.suppress(Exception):
                    state = client.read_flow_run(self._flow_run).state
                    if state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED):
                        self._asked.set()
                        self._stop()
                        return


def asked(seconds: float) -> Exception | None:
    """Asks the server until it answers, for so long; returns the error of the last try, None where it has answered."""
    deadline = time.monotonic() + seconds
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings={"timeout": ASK_SECONDS}, sync_client=True) as client,
    ):
        while True:
            error = client.api_healthcheck()
            # What answers is there, whatever it thinks of the question.
            if error is None or isinstance(error, HTTPStatusError):
                return None
            if time.monotonic() >= deadline:
                return error
            time.sleep(0.5)


def give_up_soon() -> None:
    """Inside of a flow that is about to end: where the server does not answer, the flow's client waits for it no more.

    Else Prefect tries for minutes to tell it the flow's end.
    """
    context = SyncClientContext.get()
    if context is None or asked(END_SECONDS) is None:
        return
    context.client._client.timeout = Timeout(ASK_SECONDS)
    os.environ["PREFECT_CLIENT_MAX_RETRIES"] = "0"
    refresh_global_settings_context()


def send_events() -> None:
    """Sends what Prefect's client still holds: it reports task runs and logs to the server in the background."""
    for worker in (EventsWorker, APILogWorker):
        waited = worker.drain_all(timeout=DRAIN_SECONDS)
        # Outside of a loop a pair: what is done, and what is not.
        if isinstance(waited, tuple) and waited[1]:
            leave_soon()

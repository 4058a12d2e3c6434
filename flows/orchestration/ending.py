"""Whether a Prefect server answers, and how long a command waits at the end of its run where it does not."""

from __future__ import annotations

import os
import time

from httpx import HTTPStatusError, Timeout
from prefect.client.orchestration import get_client
from prefect.context import SyncClientContext, refresh_global_settings_context
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.orchestration.leaving import leave_soon

ASK_SECONDS = 5.0
"""For the answer to one question whether a server is well."""
BEGIN_SECONDS = 8.0
"""For a server to answer before a run is begun on it: two questions."""
END_SECONDS = 30.0
"""For a server to answer at the end of a run: a private one that has died is started again meanwhile."""
DRAIN_SECONDS = 5.0
"""For events, and for logs, to be sent."""


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

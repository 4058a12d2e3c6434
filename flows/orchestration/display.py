"""Calls that only display something in Prefect, in a separate thread: a slow or hanging server does not delay a run.

The next call of a name replaces a waiting one. A call has `CALL_SECONDS`, and is repeated if the server was busy or
dropped the connection. After an unanswered call the thread makes none for `QUIET_SECONDS`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from contextvars import copy_context

from httpx import ConnectError, HTTPStatusError, TimeoutException, TransportError
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import MissingContextError
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from rlhf.tuning.retries import BUSY, retried

CALL_SECONDS = 10.0
QUIET_SECONDS = 60.0
TRIES, FIRST_PAUSE_SECONDS = 3, 1.0

Call = Callable[[SyncPrefectClient], object]


def short_client() -> SyncPrefectClient:
    """Return a separate client whose requests have `CALL_SECONDS`."""
    return get_client(httpx_settings={"timeout": CALL_SECONDS}, sync_client=True)


class Display:
    """A thread that makes calls; the first call starts it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: dict[str, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None
        self._at_work = self._ended = False
        self._quiet_until = 0.0
        # Only the thread uses these.
        self._client: SyncPrefectClient | None = None
        self._closing = contextlib.ExitStack()

    def put(self, name: str, call: Call) -> None:
        """Make a call soon, in the context of the caller; it replaces a waiting one of this name."""
        context = copy_context()
        with self._changed:
            self._calls[name] = functools.partial(context.run, self._make, call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="display", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def finish(self, seconds: float) -> None:
        """End the thread after all calls; stop waiting after `seconds`, or if the server does not answer."""
        with self._changed:
            self._changed.wait_for(lambda: self._quiet() > 0 or not (self._calls or self._at_work), timeout=seconds)
            self._ended = True
            self._changed.notify_all()

    def _quiet(self) -> float:
        return self._quiet_until - time.monotonic()

    def _run(self) -> None:
        with self._closing:
            while True:
                with self._changed:
                    while not self._ended and (not self._calls or self._quiet() > 0):
                        self._changed.wait(self._quiet() if self._calls else None)
                    if self._ended:
                        return
                    call = self._calls.pop(next(iter(self._calls)))
                    self._at_work = True
                call()
                with self._changed:
                    self._at_work = False
                    self._changed.notify_all()

    def _make(self, call: Call) -> None:
        """Make a call; log its error."""
        try:
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
                if self._client is None:
                    self._client = self._closing.enter_context(short_client())
                client = self._client
                retried(lambda: call(client), tries=TRIES, first_seconds=FIRST_PAUSE_SECONDS, passing=_may_succeed)
        except Exception as e:
            not_shown(e)
            if isinstance(e, TransportError):
                with self._changed:
                    self._quiet_until = time.monotonic() + QUIET_SECONDS
                    self._changed.notify_all()


def _may_succeed(error: Exception) -> bool:
    """Whether the same call may succeed a second later."""
    if isinstance(error, HTTPStatusError):
        return error.response.status_code in BUSY
    return isinstance(error, TransportError) and not isinstance(error, TimeoutException | ConnectError)


def not_shown(error: Exception) -> None:
    """Log an error of display code."""
    logger: logging.Logger | logging.LoggerAdapter[logging.Logger] = logging.getLogger("rlhf")
    # Outside of a flow.
    with contextlib.suppress(MissingContextError):
        logger = get_run_logger()
    logger.warning("not shown in Prefect: %s: %s", type(error).__name__, error)

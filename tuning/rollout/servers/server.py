"""One HTTP server: its URL, requests to it with retries, and the errors that they raise."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from tuning.retries import BUSY, pause
from tuning.rollout.servers.child import Child
from tuning.rollout.servers.protocol import ServerLost, ServerRefused

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
"""Seconds between tries."""


class RemoteServer:
    """A server at a URL, or one that `child` starts. All methods but `ask` block."""

    def __init__(
        self, url: str = "", child: Child | None = None, *, timeout: float = 600.0, retries: int = 4, key: str = ""
    ):
        """`timeout`: seconds without an answer; `retries`: of a request to a busy server; `key`: the bearer token."""
        self.child, self._url = child, url.rstrip("/")
        self._retries = retries
        self.options: dict[str, Any] = {
            "timeout": httpx.Timeout(timeout, connect=10.0, pool=None),
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            # Rollout servers are inside the cluster: a proxy in the environment is for other hosts.
            "trust_env": False,
        }
        self.adapter: str | None = None
        """Name of the adapter that it was last given."""
        self.given: str | None = None
        """Name of the dense weights that it was last given."""
        self.started_on: str | None = None
        """Name of the weights that the child was started on, until it gets others."""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Its present address: a child gets another port with each start."""
        return self._url or "a server that was not started"

    def start(self, folder: Path) -> None:
        """Starts the child, or starts it again, on a model."""
        assert self.child is not None
        self._url = self.child.start(folder)
        self.adapter = self.given = self.started_on = None

    def answers(self) -> bool:
        """Whether it is healthy now."""
        with contextlib.suppress(ServerLost):
            self.wait(0.0)
            return True
        return False

    def wait(self, seconds: float) -> None:
        """Returns when it is healthy. Raises ServerLost after `seconds`, or when its process has ended."""
        deadline = time.monotonic() + seconds
        attempt, last = 0, ""
        while True:
            if self.child is not None and not self.child.alive:
                raise ServerLost(f"the server at {self.url} is gone: {self.child.obituary()}")
            try:
                health = httpx.get(f"{self._url}/health", **self.options | {"timeout": 10.0})
                if health.status_code == 200:
                    return
                last = f"status {health.status_code}"
            except httpx.TransportError as e:
                last = f"{type(e).__name__} {e}".strip()
            left = deadline - time.monotonic()
            if left <= 0:
                log = "" if self.child is None else f"; its log is {self.child.log}"
                raise ServerLost(f"{self.url}/health was not well within {seconds:g} s (last: {last}){log}")
            time.sleep(min(pause(attempt, FIRST_PAUSE, 2.0), left))
            attempt += 1

    def get(self, path: str) -> Any:
        """The JSON of a path. Raises ServerLost and ServerRefused (see `protocol.Control`)."""
        return self._call("GET", path, None)

    def post(self, path: str, body: Any = None) -> Any:
        """As `get`; None if the answer is empty."""
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: Any) -> Any:
        for attempt in range(self._retries + 1):
            try:
                response = httpx.request(method, self._url + path, json=body, **self.options)
            except httpx.TransportError as e:
                raise self._lost(path, e) from e
            # A call that changes weights and fails with 500 fails again; the other busy statuses are worth a retry.
            if response.status_code not in BUSY or response.status_code == 500 or attempt == self._retries:
                return self._read(path, response)
            time.sleep(pause(attempt, FIRST_PAUSE, LONGEST_PAUSE))
        raise AssertionError("unreachable")

    async def ask(self, client: httpx.AsyncClient, path: str, body: Any = None) -> Any:
        """As `post`, or as `get` without a body, from a coroutine."""
        for attempt in range(self._retries + 1):
            try:
                response = await client.request("GET" if body is None else "POST", self._url + path, json=body)
            except httpx.TransportError as e:
                raise self._lost(path, e) from e
            if response.status_code not in BUSY or attempt == self._retries:
                return self._read(path, response)
            await asyncio.sleep(pause(attempt, FIRST_PAUSE, LONGEST_PAUSE))
        raise AssertionError("unreachable")

    def _lost(self, path: str, error: Exception) -> ServerLost:
        return ServerLost(f"{self.url}{path}: {type(error).__name__} {error}".rstrip())

    def _read(self, path: str, response: httpx.Response) -> Any:
        if response.status_code in BUSY:
            raise ServerLost(f"{self.url}{path} answered {response.status_code}: {_message(response)}")
        if response.status_code >= 400:
            raise ServerRefused(f"{self.url}{path} answered {response.status_code}: {_message(response)}")
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError:
            # Some endpoints answer with plain text.
            return {"message": response.text}


def _message(response: httpx.Response) -> str:
    """The error text of a response, in one line of at most 300 characters."""
    try:
        value = response.json()
        error = value.get("error", value)
        text = error.get("message") or error.get("detail") or error if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(str(text).split())[:300]

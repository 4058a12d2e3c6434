"""One HTTP server of a rollout engine: what it is asked, what it says about itself, how it is found again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from tuning.rollout.servers.child import Child
from tuning.rollout.servers.protocol import ServerLost, ServerRefused

BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Statuses that may pass."""
LONGEST_PAUSE = 8.0


def pause(attempt: int) -> float:
    """Seconds before the next try."""
    return min(0.25 * 2**attempt, LONGEST_PAUSE)


class RemoteServer:
    """A server at a URL, or one that `child` starts."""

    def __init__(
        self, url: str = "", child: Child | None = None, *, timeout: float = 600.0, retries: int = 4, key: str = ""
    ):
        """`timeout`: seconds without an answer; `retries`: of a request that meets a busy server; `key`: a bearer's."""
        self.child, self._url = child, url.rstrip("/")
        self._retries = retries
        self.options: dict[str, Any] = {
            "timeout": httpx.Timeout(timeout, connect=10.0, pool=None),
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            # A server of one's own is not asked through a proxy that the environment names.
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
        """Where it is now."""
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
        """Returns when it is healthy. Raises ServerLost after so many seconds, or when its process has ended."""
        deadline = time.monotonic() + seconds
        attempt, last = 0, ""
        while True:
            if self.child is not None and not self.child.alive:
                raise ServerLost(f"the server at {self.url} is gone: {self.child.obituary()}")
            try:
                found = httpx.get(f"{self._url}/health", **self.options | {"timeout": 10.0})
                if found.status_code == 200:
                    return
                last = f"status {found.status_code}"
            except httpx.TransportError as e:
                last = f"{type(e).__name__} {e}".strip()
            left = deadline - time.monotonic()
            if left <= 0:
                log = "" if self.child is None else f"; its log is {self.child.log}"
                raise ServerLost(f"{self.url}/health was not well within {seconds:g} s (last: {last}){log}")
            time.sleep(min(pause(attempt), 2.0, left))
            attempt += 1

    def get(self, path: str) -> Any:
        """The JSON of a path; see `protocols.Control`."""
        return self._call("GET", path, None)

    def post(self, path: str, body: Any = None) -> Any:
        """As `get`; None where the answer is empty."""
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: Any) -> Any:
        for attempt in range(self._retries + 1):
            try:
                found = httpx.request(method, self._url + path, json=body, **self.options)
            except httpx.TransportError as e:
                raise self._lost(path, e) from e
            # A server that fails at something it was told to do fails again; one that is busy may not.
            if found.status_code not in BUSY or found.status_code == 500 or attempt == self._retries:
                return self._read(path, found)
            time.sleep(pause(attempt))
        raise AssertionError("unreachable")

    async def ask(self, client: httpx.AsyncClient, path: str, body: Any = None) -> Any:
        """As `post`, or `get` where there is no body, from a coroutine."""
        for attempt in range(self._retries + 1):
            try:
                found = await client.request("GET" if body is None else "POST", self._url + path, json=body)
            except httpx.TransportError as e:
                raise self._lost(path, e) from e
            if found.status_code not in BUSY or attempt == self._retries:
                return self._read(path, found)
            await asyncio.sleep(pause(attempt))
        raise AssertionError("unreachable")

    def _lost(self, path: str, error: Exception) -> ServerLost:
        return ServerLost(f"{self.url}{path}: {type(error).__name__} {error}".rstrip())

    def _read(self, path: str, found: httpx.Response) -> Any:
        if found.status_code in BUSY:
            raise ServerLost(f"{self.url}{path} answered {found.status_code}: {_message(found)}")
        if found.status_code >= 400:
            raise ServerRefused(f"{self.url}{path} answered {found.status_code}: {_message(found)}")
        if not found.content:
            return None
        try:
            return found.json()
        except ValueError:
            # Some endpoints answer in words.
            return {"message": found.text}


def _message(found: httpx.Response) -> str:
    """What a server says about a failure."""
    try:
        value = found.json()
        error = value.get("error", value)
        text = error.get("message") or error.get("detail") or error if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = found.text
    return " ".join(str(text).split())[:300]

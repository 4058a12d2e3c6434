"""One HTTP server: its URL, requests to it with retries, and the errors that they raise.

httpx's own retries repeat only failed connections, and a busy server answers with a status.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import httpx

from rlhf.tuning.retries import BUSY, pause
from rlhf.tuning.rollout.servers.child import Child
from rlhf.tuning.rollout.servers.protocol import ServerLost, ServerRefused

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
"""Seconds between tries."""


class RemoteServer:
    """A server at a URL, or one that `child` starts. All methods but `ask` block."""

    def __init__(
        self, url: str = "", child: Child | None = None, *, timeout: float = 600.0, retries: int = 4, key: str = ""
    ):
        """timeout: seconds until an answer is whole. retries: of a request to a busy server. key: the bearer token."""
        self.child, self._url, self._timeout, self._retries = child, url.rstrip("/"), timeout, retries
        self.options: dict[str, Any] = {
            "timeout": httpx.Timeout(timeout, connect=10.0, pool=None),
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            # Rollout servers are inside the cluster: a proxy in the environment is for other hosts.
            "trust_env": False,
            # Once: each client would make another, in 30 ms, and a turn of an episode has a client for each server.
            "verify": httpx.create_ssl_context(trust_env=False),
        }
        self.adapter: str | None = None
        """Name of the adapter that it was last given."""
        self.given: str | None = None
        """Name of the dense weights that it was last given."""
        self.asleep: list[str] = []
        """Tags of the memory that it has given back."""
        self.lock = threading.Lock()
        self.proofs = 0
        """How often it has proved its weights."""

    @property
    def url(self) -> str:
        """Its present address: each start of a child selects another port."""
        return self._url or "a server that was not started"

    def start(self, folder: Path) -> None:
        """Start or restart the child on a model."""
        assert self.child is not None
        self._url = self.child.start(folder)
        self.adapter = self.given = None
        self.asleep = []

    def end(self) -> None:
        """End the child, if it is one."""
        if self.child is not None:
            self.child.end()

    def answers(self) -> bool:
        """Return whether it is healthy now."""
        with contextlib.suppress(ServerLost):
            self.wait(0.0)
            return True
        return False

    def wait(self, seconds: float) -> None:
        """Return when it is healthy. Raises ServerLost after `seconds`, or when its process has ended."""
        deadline = time.monotonic() + seconds
        attempt, last = 0, ""
        while True:
            if self.child is not None and not self.child.alive:
                raise ServerLost(f"the server at {self.url} is gone: {self.child.obituary()}")
            try:
                status = httpx.get(f"{self._url}/health", **self.options | {"timeout": 10.0}).status_code
                if status == 200:
                    return
                last = f"status {status}"
            except httpx.HTTPError as e:
                last = f"{type(e).__name__} {e}".strip()
            left = deadline - time.monotonic()
            if left <= 0:
                log = "" if self.child is None else f": {self.child.obituary()}"
                raise ServerLost(f"{self.url}/health was not well within {seconds:g} s (last: {last}){log}")
            time.sleep(min(pause(attempt, FIRST_PAUSE, 2.0), left))
            attempt += 1

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object of a path. Raises ServerLost and ServerRefused."""
        value: dict[str, Any] = self._call("GET", path, None)
        return value

    def post(self, path: str, body: Any = None) -> Any:
        """Return the JSON of an answer; None if it is empty. Raises as `get` does."""
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: Any) -> Any:
        async def call() -> Any:
            async with httpx.AsyncClient(**self.options) as client:
                # A call that changes weights and fails with 500 fails again; other busy statuses are worth a retry.
                return await self._ask(client, method, path, body, set(BUSY) - {500})

        return asyncio.run(call())

    async def ask(self, client: httpx.AsyncClient, path: str, body: Any = None) -> Any:
        """As `post`, or as `get` without a body, from a coroutine."""
        return await self._ask(client, "GET" if body is None else "POST", path, body, BUSY)

    async def _ask(self, client: httpx.AsyncClient, method: str, path: str, body: Any, passing: Collection[int]) -> Any:
        for attempt in range(self._retries + 1):
            try:
                # httpx's limit is of each read: a server that sends a byte now and then would never end.
                async with asyncio.timeout(self._timeout):
                    response = await client.request(method, self._url + path, json=body)
            except TimeoutError as e:
                raise ServerLost(f"{self.url}{path} gave no whole answer within {self._timeout:g} s") from e
            except httpx.HTTPError as e:
                raise ServerLost(f"{self.url}{path}: {type(e).__name__} {e}".rstrip()) from e
            if response.status_code not in passing:
                break
            if attempt < self._retries:
                await asyncio.sleep(pause(attempt, FIRST_PAUSE, LONGEST_PAUSE))
        if response.is_error:
            kind = ServerLost if response.status_code in BUSY else ServerRefused
            text = " ".join(response.text.split())[:300]
            raise kind(f"{self.url}{path} answered {response.status_code}: {text}")
        try:
            value = response.json() if response.content else None
        except (ValueError, RecursionError):
            # Some endpoints answer with plain text.
            value = {"message": response.text}
        if method == "GET" and not isinstance(value, dict):
            raise ServerLost(f"{self.url}{path} answered {str(value)[:100]}; expected an object")
        return value

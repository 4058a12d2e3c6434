"""One HTTP server: its URL, requests to it with retries, and the errors that they raise."""

from __future__ import annotations

import asyncio
import contextlib
import json
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
CONNECT_SECONDS = 10.0
ANSWER_BYTES = 2**30


class RemoteServer:
    """A server at a URL, or one that `child` starts. All methods but `ask` block."""

    def __init__(
        self, url: str = "", child: Child | None = None, *, timeout: float = 600.0, retries: int = 4, key: str = ""
    ):
        """`timeout`: seconds without an answer; `retries`: of a request to a busy server; `key`: the bearer token."""
        self.child, self._url = child, url.rstrip("/")
        self._retries, self._timeout = retries, timeout
        self.options: dict[str, Any] = {
            "timeout": httpx.Timeout(timeout, connect=CONNECT_SECONDS, pool=None),
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
                # Its body is not read: it may have no end.
                with httpx.stream("GET", f"{self._url}/health", **self.options | {"timeout": 10.0}) as health:
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
        async def called() -> Any:
            async with httpx.AsyncClient(**self.options) as client:
                # A call that changes weights and fails with 500 fails again; other busy statuses are worth a retry.
                return await self._tried(client, method, path, body, set(BUSY) - {500})

        return asyncio.run(called())

    async def ask(self, client: httpx.AsyncClient, path: str, body: Any = None) -> Any:
        """As `post`, or as `get` without a body, from a coroutine."""
        return await self._tried(client, "GET" if body is None else "POST", path, body, BUSY)

    async def _tried(
        self, client: httpx.AsyncClient, method: str, path: str, body: Any, passing: Collection[int]
    ) -> Any:
        for attempt in range(self._retries + 1):
            status, content = await self._answer(client, method, path, body)
            if status not in passing or attempt == self._retries:
                return self._read(path, status, content)
            await asyncio.sleep(pause(attempt, FIRST_PAUSE, LONGEST_PAUSE))
        raise AssertionError("unreachable")

    async def _answer(self, client: httpx.AsyncClient, method: str, path: str, body: Any) -> tuple[int, bytes]:
        """(status, body) of a request. Raises ServerLost unless all of it arrives in time, and in ANSWER_BYTES."""
        content = bytearray()
        try:
            # The timeout of httpx is that of each read.
            async with (
                asyncio.timeout(self._timeout + CONNECT_SECONDS),
                client.stream(method, self._url + path, json=body, headers={"Accept-Encoding": "identity"}) as response,
            ):
                if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
                    raise ServerLost(f"{self.url}{path} answered in {encoding}; expected no compression")
                async for part in response.aiter_raw():
                    content += part
                    if len(content) > ANSWER_BYTES:
                        raise ServerLost(f"{self.url}{path} answered more than {ANSWER_BYTES} bytes")
                return response.status_code, bytes(content)
        except TimeoutError as e:
            raise ServerLost(f"{self.url}{path}: no whole answer within {self._timeout:g} s") from e
        except httpx.HTTPError as e:
            raise ServerLost(f"{self.url}{path}: {type(e).__name__} {e}".rstrip()) from e

    def _read(self, path: str, status: int, content: bytes) -> Any:
        text = content.decode(errors="replace")
        try:
            value = json.loads(text) if text else None
        except ValueError:
            # Some endpoints answer with plain text.
            value = {"message": text}
        except RecursionError as e:
            raise ServerLost(f"{self.url}{path} answered JSON that is nested too deeply") from e
        if status in BUSY:
            raise ServerLost(f"{self.url}{path} answered {status}: {_message(value)}")
        if status >= 400:
            raise ServerRefused(f"{self.url}{path} answered {status}: {_message(value)}")
        return value


def _message(value: Any) -> str:
    """The error text of an answer, in one line of at most 300 characters."""
    error = value.get("error", value) if isinstance(value, dict) else value
    text = error.get("message") or error.get("detail") or error if isinstance(error, dict) else error
    return " ".join(str(text).split())[:300]

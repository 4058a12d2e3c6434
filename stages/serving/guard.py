"""What stands before the routes of a server: its keys, and bounds on what one client can take from the others.

    connection -> head in time, few enough (rlhf.stages.serving.connection)
        -> key -> few enough at once -> body small and in time -> answered in time -> routes

A refusal is an error in OpenAI's form, with the limit and what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from rlhf.stages.serving.access import Keys, is_address
from rlhf.stages.serving.metrics import Counts

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

OPEN = ("/health", "/ready")
"""Asked without a key, and while the server is full: supervisors act on them."""
METRICS = "/metrics"
OWNER = "rlhf.owner"
"""In a request's scope: whose key it has."""
WEIGHTS = "/weights"
"""A policy comes to a busy server too."""
RETRY_SECONDS = 1
DRAINED = 4
"""A body that is too large is read, and dropped, up to so many times its limit: then its client gets the answer in
place of a broken connection."""
LAST_WORD_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What one request may take."""

    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    """For the whole body to arrive."""
    requests: int = 256
    """Answered at once; further ones get status 429."""
    request_seconds: float = 600.0
    """From its head to the end of its answer."""


class Refused(Exception):
    """A request that gets no further than here."""

    def __init__(self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers or {}


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: Any, counts: Counts, bounds: Bounds | None = None, keys: Keys | None = None):
        self._app, self.counts, self.bounds, self._keys = app, counts, bounds or Bounds(), keys or Keys()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer, began = Answer(send), time.monotonic()
        limit = asyncio.timeout(self.bounds.request_seconds)
        try:
            async with limit:
                await self._guarded(scope, receive, answer)
        except Refused as refused:
            await answer.refuse(refused)
        except TimeoutError:
            # Or one of the application's own.
            if not limit.expired():
                raise
            seconds = self.bounds.request_seconds
            message = f"no whole answer within {seconds:g} s: ask for fewer samples or tokens (--request-seconds)"
            await answer.refuse(Refused(504, message, "time_limit"))
        finally:
            self.counts.answered(scope["path"], answer.status, time.monotonic() - began)

    async def _guarded(self, scope: Mapping[str, Any], receive: Receive, answer: Answer) -> None:
        headers = {name: value for name, value in scope["headers"]}
        if scope["path"] in OPEN and scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, answer.send)
            return
        self._check(headers)
        scope = {**scope, OWNER: self._keys.owner(headers.get(b"authorization"))}
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, answer.send)
            return
        counted = scope["path"] != WEIGHTS
        if counted and self.counts.in_flight >= self.bounds.requests:
            text = f"{self.bounds.requests} requests are being answered (--requests): ask again"
            raise Refused(429, text, "too_many_requests", {"retry-after": str(RETRY_SECONDS)})
        self.counts.in_flight += counted
        try:
            body = await self._body(headers, receive, self.bounds.body_bytes)
            if body is not None:
                await self._app(scope, _replayed(body, receive), answer.send)
        finally:
            self.counts.in_flight -= counted

    def _check(self, headers: Mapping[bytes, bytes]) -> None:
        if not self._keys.take(headers.get(b"authorization")):
            given = b"authorization" in headers
            text = "this server does not take the key that was sent" if given else "a key is needed"
            text += ": send one of its keys as `Authorization: Bearer KEY`"
            raise Refused(401, text, "invalid_api_key", {"www-authenticate": "Bearer"})
        host = headers.get(b"host", b"localhost").decode("latin-1")
        if not self._keys and not is_address(host):
            # A page of the browser whose name was pointed at this machine (DNS rebinding).
            raise Refused(403, f"Host is {host!r}: without a key only an address or localhost is answered", "host")

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive, limit: int) -> bytes | None:
        """The whole body, of at most `limit` bytes; None where the client left."""
        seconds = self.bounds.body_seconds
        told = headers.get(b"content-length", b"0")
        large = Refused(413, f"the body is larger than {limit} bytes (--body-megabytes): send less", "body_too_large")
        if len(told) > 18 or int(told) > DRAINED * limit:
            raise large
        parts, size = [], 0
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= limit:
                        parts.append(part)
                    if size > DRAINED * limit or not message.get("more_body", False):
                        break
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {seconds:g} s: send it faster", "slow_body") from None
        if size > limit:
            raise large
        return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` of an application whose body was read before."""
    rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return rest.pop() if rest else await receive()

    return replayed


class Answer:
    """What has been sent of one answer."""

    def __init__(self, send: Send):
        self._send = send
        self.status = 0
        self._streams = self._ended = False

    async def send(self, message: Message) -> None:
        """Passes a message on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._streams = any(
                v.startswith(b"text/event-stream") for n, v in message["headers"] if n == b"content-type"
            )
        self._ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def refuse(self, refused: Refused) -> None:
        """The refusal as the answer, or as the last event of one that has begun."""
        kind = "invalid_request_error" if refused.status < 500 else "server_error"
        error = {"message": str(refused), "type": kind, "param": None, "code": refused.code}
        body = json.dumps({"error": error}).encode()
        if self.status == 0:
            told = {"content-type": "application/json", "content-length": str(len(body)), **refused.headers}
            # What is left of the body is not read.
            told["connection"] = "close"
            headers = [(name.encode(), value.encode()) for name, value in told.items()]
            await self.send({"type": "http.response.start", "status": refused.status, "headers": headers})
        elif self._streams:
            body = b"data: " + body + b"\n\n"
        else:
            return
        if not self._ended:
            # A client that reads nothing takes no last word either; its connection is closed then.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_SECONDS):
                    await self.send({"type": "http.response.body", "body": body})

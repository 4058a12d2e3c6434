"""ASGI middleware of a server: keys, the check of `Host`, and limits on the number, size and time of requests.

FastAPI's dependencies do not fit: they run after the routes have been matched, and have no limit of time on a stream.
Slow clients and the number of connections are a proxy's job (docs/guides/serving.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.routing import Match

from rlhf.stages.serving.access import is_loopback, owner_of
from rlhf.stages.serving.errors import RequestError, answer_of
from rlhf.stages.serving.metrics import Metrics
from rlhf.stages.serving.settings import ServeOptions

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

OPEN = ("/health", "/ready")
"""Answered without a key and without limits: supervisors act on them."""
OWNER = "rlhf.owner"
"""In a request's scope: the position of its key."""
WEIGHTS = "/weights"
"""Not counted as a request: a busy server takes weights too."""
LAST_WORD_SECONDS = 5.0


class Refused(RequestError):
    """A request that is over a limit or has no key."""

    def __init__(self, status: int, message: str, code: str, **headers: str):
        super().__init__(message)
        # The rest of the body is not read.
        self.status, self.code, self.headers = status, code, headers | {"connection": "close"}


class Guard:
    """An ASGI application around a FastAPI application."""

    def __init__(self, app: Any, metrics: Metrics, options: ServeOptions | None = None, keys: Sequence[str] = ()):
        self._app, self._metrics, self._options, self._keys = app, metrics, options or ServeOptions(), keys
        self.busy = 0
        """Requests that are being answered."""

    @property
    def full(self) -> bool:
        """Whether a further request would be refused."""
        return self.busy >= self._options.requests

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, status, streams = time.monotonic(), 0, False

        async def watch(message: Message) -> None:
            nonlocal status, streams
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                status, streams = message["status"], headers.get(b"content-type", b"").startswith(b"text/event-stream")
            elif not message.get("more_body", False):
                streams = False
            await send(message)

        seconds = self._options.request_seconds
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                await self._answer(scope, receive, watch)
        except Refused as refused:
            await (await answer_of(None, refused))(scope, receive, watch)
        except TimeoutError:
            # The application has timeouts too.
            if not limit.expired():
                raise
            message = f"no whole answer within {seconds:g} s: ask for fewer samples or tokens (--request-seconds)"
            answer = await answer_of(None, Refused(504, message, "time_limit"))
            # A client that reads nothing does not take the error either.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_SECONDS):
                    if status == 0:
                        await answer(scope, receive, watch)
                    elif streams:
                        await watch({"type": "http.response.body", "body": b"data: " + bytes(answer.body) + b"\n\n"})
        finally:
            matches = (route.path for route in self._app.routes if route.matches(scope)[0] is Match.FULL)
            self._metrics.requests.labels(next(matches, "other"), status).inc()
            self._metrics.seconds.observe(time.monotonic() - began)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN and scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope[OWNER] = owner_of(self._keys, headers.get("authorization", "").encode("latin-1"))
        if scope[OWNER] is None:
            fault = (
                "this server does not take the key that was sent" if "authorization" in headers else "a key is needed"
            )
            text = f"{fault}: send one of its keys as `Authorization: Bearer KEY`"
            raise Refused(401, text, "invalid_api_key", **{"www-authenticate": "Bearer"})
        host = headers.get("host", "localhost")
        if not self._keys and not is_loopback(host):
            # DNS rebinding: a page in a browser has pointed its own name at this machine.
            raise Refused(403, f"Host is {host!r}: without a key, send a loopback address or localhost", "host")
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        counted = scope["path"] != WEIGHTS
        if counted and self.full:
            text = f"{self._options.requests} requests are being answered (--requests): ask again"
            raise Refused(429, text, "too_many_requests", **{"retry-after": "1"})
        self.busy += counted
        try:
            await self._app(scope, self._limited(headers, receive), send)
        finally:
            self.busy -= counted

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        """Return `receive` for a body of a limited size. It raises Refused for a larger one."""
        left = limit = int(self._options.body_megabytes * 2**20)

        async def receive_limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                # A client reads the answer after it has sent its whole body.
                while message.get("more_body"):
                    message = await receive()
                raise Refused(413, f"the body is larger than {limit} bytes (--body-megabytes)", "body_too_large")
            return message

        return receive_limited

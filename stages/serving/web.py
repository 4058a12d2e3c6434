"""The HTTP server: uvicorn with this project's settings."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""Time for the head of a request; uvicorn has no limit."""
CLOSING_SECONDS = 30
"""Time for answers under way after a signal."""


class Connection(H11Protocol):
    """A connection whose client sends each request in time. Half of this process's files are left to others."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        if 0 < most < len(self.connections):
            others: Any = self.connections
            silent = (one for one in others if one.is_silent and not one.transport.is_closing())
            min(silent, key=lambda one: one.since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._timer.cancel()

    def on_response_complete(self) -> None:
        self._timer.cancel()
        self._await_head()
        super().on_response_complete()

    @property
    def is_silent(self) -> bool:
        """Whether it waits for the head of a request."""
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self.since = self.loop.time()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._drop_silent)

    def _drop_silent(self) -> None:
        if self.is_silent:
            self.transport.abort()


class Web(uvicorn.Server):
    """A server of an application; `run` serves until a signal."""

    def __init__(self, app: Any, host: str, port: int, on_end: Callable[[], Any] = lambda: None):
        """on_end: called after the last answer. `run` then waits for the threads of the application."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                # Unlike httptools, h11 limits the head of a request.
                http=Connection,
                ws="none",
                lifespan="off",
                log_level="warning",
                timeout_graceful_shutdown=CLOSING_SECONDS,
            )
        )
        self._on_end = on_end

    @property
    def url(self) -> str:
        """Where a started server listens."""
        host, port, *_ = self.servers[0].sockets[0].getsockname()
        return f"http://{host}:{port}"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End connections after their answers, or after CLOSING_SECONDS."""
        try:
            await super().shutdown(sockets)
        finally:
            self._on_end()

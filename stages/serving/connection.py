"""Connections of a server: uvicorn's, with limits of time on clients that send or read slowly."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlhf.stages.serving.guard import METRICS, OPEN

HEAD_SECONDS = 10.0
"""For the head of a request to arrive, from its first byte or from the connection; and for the rest of a body that
nobody reads, since the request is answered."""
STALL_SECONDS = 60.0
"""A client that takes nothing of its answer for so long is let go."""
CONNECTIONS, SPARE = 512, 16
"""The spare ones, above those for clients, answer the questions of supervisors alone, each one and then the next."""
SPARE_HEAD_SECONDS = 2.0
CLOSING_SECONDS = 30
"""For answers under way when the server is told to end."""
NO_ROOM = b"too many connections\n"
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-type: text/plain\r\ncontent-length: 21\r\n\r\n" + NO_ROOM
)


class Patient(H11Protocol):
    """A connection whose client has to send its requests, and to read its answers, in time."""

    head_seconds, stall_seconds, most = HEAD_SECONDS, STALL_SECONDS, CONNECTIONS
    _spare = False
    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = transport.get_extra_info("socket")
        if peer is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # Also for what is left in the kernel's buffer of a client that reads no more.
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self.stall_seconds))
        if len(self.connections) > self.most + SPARE:
            transport.write(FULL)
            transport.close()
            return
        if len(self.connections) > self.most:
            self._spare, self.head_seconds = True, min(self.head_seconds, SPARE_HEAD_SECONDS)
            self.app = questions_alone(self.app)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._spare:
            self.transport.close()
        self._watch()

    def _watch(self) -> None:
        """Limits the wait for the head of the next request, and for the rest of one that is answered already."""
        answered = self.cycle is None or self.cycle.response_complete
        waits = self.conn.their_state is h11.IDLE or (self.conn.their_state is h11.SEND_BODY and answered)
        # Behind an answer uvicorn's own limit holds, which ends with the next byte.
        if waits and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self._timer = self._timer or self.loop.call_later(self.head_seconds, self.transport.abort)
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(self.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)


def questions_alone(app: Any) -> Any:
    """An application that answers supervisors and scrapers as `app` does, and others that there is no room."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] in (*OPEN, METRICS):
            await app(scope, receive, send)
            return
        headers = [(b"retry-after", b"1"), (b"connection", b"close"), (b"content-type", b"text/plain")]
        headers.append((b"content-length", str(len(NO_ROOM)).encode()))
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": NO_ROOM})

    return answer


class Web(uvicorn.Server):
    """A server that says when it answers no more."""

    ended: Callable[[], None] | None = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends connections, each behind its answer where that comes in time."""
        try:
            await super().shutdown(sockets)
        finally:
            if self.ended is not None:
                self.ended()


def web_server(
    app: Any, host: str, port: int, protocol: type[Patient] = Patient, ended: Callable[[], None] | None = None
) -> Web:
    """A server of an application; `run` serves until a signal.

    ended: called when answers have ended, or their time has. `run` waits then for the threads that the application has
    used: this ends what they wait for.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
    web = Web(config)
    web.ended = ended
    return web

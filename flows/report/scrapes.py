"""A server for scrapes: few connections, whose clients ask and read in time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

CLIENT_SECONDS = 10.0
"""For a client to send its request, and to take a part of its answer."""
CONNECTIONS = 64
FULL = b"HTTP/1.0 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Handler(WSGIRequestHandler):
    """A connection and its one request."""

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(CLIENT_SECONDS)

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError):
            super().handle()

    def get_environ(self) -> dict[str, Any]:
        # The head is read by now.
        assert isinstance(self.server, Server)
        self.server.has_asked(self.connection)
        return super().get_environ()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape is no news."""


class Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, of which there are at most `CONNECTIONS`."""

    daemon_threads = True

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int]):
        self.address_family = family
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float | None] = {}
        """Open connections; those that have not asked yet with their beginning."""
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._since) >= CONNECTIONS
            if not full:
                self._since[request] = time.monotonic()
        if not full:
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(FULL)
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def has_asked(self, connection: socket.socket) -> None:
        """Says that the request of a connection has arrived."""
        with self._lock:
            self._since[connection] = None

    def service_actions(self) -> None:
        # Also of clients that send a byte from time to time.
        late = time.monotonic() - CLIENT_SECONDS
        with self._lock:
            slow = [connection for connection, since in self._since.items() if since is not None and since < late]
        for connection in slow:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)


class ScrapeServer:
    """Answers in threads of its own."""

    def __init__(self, app: Any, host: str, port: int):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        self._server = Server(family, (str(address[0]), port))
        self._server.set_app(app)
        self._thread = threading.Thread(target=self._server.serve_forever, name="scrapes", daemon=True)
        self._thread.start()
        self.host, self.port = host, self._server.server_port

    def wait(self) -> None:
        """Returns when the thread has ended."""
        while self._thread.is_alive():
            self._thread.join(threading.TIMEOUT_MAX)

    def stop(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

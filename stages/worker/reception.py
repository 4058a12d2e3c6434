"""Handshakes with those that come to the lead of a gang, each in a thread: one that says nothing keeps no other out."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from stages.worker import channel
from stages.worker.channel import Channel, Message

MOST = 128
"""Handshakes at a time. One more ends the oldest: a rank's takes milliseconds, and a rank comes again."""


class Reception:
    """Takes connections of a server until it is closed."""

    def __init__(self, server: socket.socket, token: str, taken: Callable[[Channel, Message], None], most: int = MOST):
        """taken: called, by one thread at a time, with the channel and the hello of each rank."""
        self._server, self._token, self._taken, self._most = server, token, taken, most
        self._lock = threading.Lock()
        self._begun: dict[int, socket.socket] = {}
        self._count = 0
        self._open = True

    def accept(self) -> None:
        """Takes the next connection, and leaves its handshake to a thread. Raises as `socket.accept`."""
        sock = self._server.accept()[0]
        with self._lock:
            number = self._count
            self._count += 1
            if len(self._begun) >= self._most:
                _end(self._begun.pop(min(self._begun)))
            self._begun[number] = sock
        threading.Thread(target=self._greet, args=[number, sock], name=f"handshake-{number}", daemon=True).start()

    def close(self) -> None:
        """Ends the handshakes under way; none is taken any more."""
        with self._lock:
            self._open = False
            for sock in self._begun.values():
                _end(sock)

    def _greet(self, number: int, sock: socket.socket) -> None:
        try:
            opened, hello = channel.welcome(sock, self._token)
        except (OSError, ValueError, channel.Refused):
            # A stranger, or a rank that ended meanwhile.
            return
        finally:
            with self._lock:
                self._begun.pop(number, None)
        with self._lock:
            if self._open:
                self._taken(opened, hello)
            else:
                opened.close()


def _end(sock: socket.socket) -> None:
    """Wakes the thread that reads from it, which closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

"""The connection of a rank to the lead of its gang: JSON lines over TCP, between two that know the same secret.

    lead                                        rank
      nonce                        ---------->
                                   <----------    nonce, hello (rank, host, pid), proof over both nonces and hello
      proof over both nonces       ---------->    (or `refused`, with the reason)

Neither sends the secret. What follows is not encrypted, as the devices' own traffic is not: hosts of a gang trust their
network.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

HANDSHAKE_SECONDS = 20.0
LONGEST_HELLO = 1 << 16
RETRY_SECONDS = 0.3

Message = dict[str, Any]


class Refused(RuntimeError):
    """The other side does not take this process into the gang."""


class Channel:
    """One end of a connection. Several threads may send, one reads."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._lines = sock.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Sends a message. Raises OSError where the other end is gone."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            self._socket.sendall(data)

    def receive(self, limit: int = -1) -> Message | None:
        """The next message; None at the end."""
        line = self._lines.readline(limit)
        # Half a line is one whose sender has ended in the middle of it.
        return json.loads(line) if line.endswith(b"\n") else None

    def __iter__(self) -> Iterator[Message]:
        """Messages until the other end is gone."""
        with contextlib.suppress(OSError):
            while (message := self.receive()) is not None:
                yield message

    def close(self) -> None:
        """Ends the connection, also under a thread that reads."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def listen(host: str, port: int) -> socket.socket:
    """A server for ranks. Raises OSError, with the address, where it cannot be had."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, socket.SOCK_STREAM)
    # The lead before this one may have ended a moment ago.
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(address)
    except OSError as error:
        server.close()
        raise OSError(error.errno, f"the lead cannot listen at {host}:{port}: {error.strerror}") from error
    server.listen(128)
    return server


def welcome(sock: socket.socket, token: str) -> tuple[Channel, Message]:
    """The lead's side of a new connection: the channel, and the hello of the rank. Raises Refused, OSError."""
    channel = _opened(sock)
    mine = secrets.token_hex(16)
    channel.send({"nonce": mine})
    said = channel.receive(LONGEST_HELLO)
    if not isinstance(said, dict) or not isinstance(said.get("hello"), dict):
        raise Refused("it is no rank")
    nonces = [mine, str(said.get("nonce"))]
    if not hmac.compare_digest(str(said.get("proof")), _proof(token, "rank", *nonces, json.dumps(said["hello"]))):
        refuse(channel, "it has another token than the lead")
        raise Refused("it has another token")
    channel.send({"proof": _proof(token, "lead", *nonces)})
    sock.settimeout(None)
    return channel, said["hello"]


def refuse(channel: Channel, why: str) -> None:
    """Tells a rank that it is not taken, and ends the connection."""
    with contextlib.suppress(OSError):
        channel.send({"refused": why})
    channel.close()


def connect(host: str, port: int, token: str, hello: Message, wait: float) -> Channel:
    """A rank's side: a connection to the lead, for which it waits so many seconds.

    Raises TimeoutError where there is none in that time, Refused where the lead does not take this rank or has another
    token.
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
            channel = _greeted(_opened(sock), token, hello)
            if channel is not None:
                sock.settimeout(None)
                return channel
        except OSError:
            # Not there yet, or ended as this came.
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"no lead at {host}:{port} for {wait:g} s")
        time.sleep(RETRY_SECONDS)


def _greeted(channel: Channel, token: str, hello: Message) -> Channel | None:
    """The channel when both sides have proved who they are; None where the lead has ended meanwhile."""
    first = channel.receive(LONGEST_HELLO)
    if first is None:
        return None
    nonces = [str(first["nonce"]), secrets.token_hex(16)]
    proof = _proof(token, "rank", *nonces, json.dumps(hello))
    channel.send({"nonce": nonces[1], "hello": hello, "proof": proof})
    answer = channel.receive(LONGEST_HELLO)
    if answer is None:
        return None
    if "refused" in answer:
        raise Refused(answer["refused"])
    if not hmac.compare_digest(str(answer.get("proof")), _proof(token, "lead", *nonces)):
        raise Refused("the lead has another token than this rank")
    return channel


def _opened(sock: socket.socket) -> Channel:
    sock.settimeout(HANDSHAKE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that vanishes closes nothing; heartbeats notice it first.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Channel(sock)


def _proof(token: str, *words: str) -> str:
    return hmac.new(token.encode(), json.dumps(words).encode(), "sha256").hexdigest()

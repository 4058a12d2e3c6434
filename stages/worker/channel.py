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
"""For the whole of a handshake: a peer that sends slowly keeps no other waiting."""
LONGEST_HELLO = 1 << 16
RETRY_SECONDS = 0.3
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""A peer that answers nothing for two minutes is gone."""

Message = dict[str, Any]


class Refused(RuntimeError):
    """The other side does not take this process into the gang; `for_good`: nor will it another time."""

    def __init__(self, why: str, for_good: bool = True):
        super().__init__(why)
        self.for_good = for_good


class NoLead(TimeoutError):
    """No lead has answered in the time for which a rank waits."""


def encoded(message: Message) -> bytes:
    """A message as its line. Raises TypeError for what JSON cannot have."""
    return json.dumps(message).encode() + b"\n"


class Channel:
    """One end of a connection. Several threads may send, one reads."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._lines = sock.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Sends a message. Raises OSError where the other end is gone."""
        self.send_encoded(encoded(message))

    def send_encoded(self, line: bytes) -> None:
        """As `send`, with what `encoded` has made."""
        with self._lock:
            self._socket.sendall(line)

    def receive(self, seconds: float | None = None) -> Message | None:
        """The next message; None at the end.

        Raises OSError where the connection is lost, TimeoutError where nothing comes for so many seconds: the channel
        is of no use then.
        """
        if seconds is not None:
            self._socket.settimeout(seconds)
        line = self._lines.readline()
        if seconds is not None:
            self._socket.settimeout(None)
        # Half a line is one whose sender has ended in the middle of it.
        return json.loads(line) if line.endswith(b"\n") else None

    def __iter__(self) -> Iterator[Message]:
        """Messages until the other end is gone."""
        with contextlib.suppress(OSError):
            while (message := self.receive()) is not None:
                yield message

    def is_at_end(self) -> bool:
        """Whether the other end is gone, and nothing of it is left to read; for one that nobody reads meanwhile."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

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


def free_port(host: str) -> int:
    """A port of this host that nobody listens at now."""
    with listen(host, 0) as probe:
        return int(probe.getsockname()[1])


def welcome(sock: socket.socket, token: str, seconds: float = HANDSHAKE_SECONDS) -> tuple[Channel, Message]:
    """The lead's side of a new connection: the channel, and the hello of the rank.

    Raises Refused, ValueError for what no rank sends, and OSError, also where this takes longer than `seconds`. The
    connection is closed then.
    """
    deadline = time.monotonic() + seconds
    try:
        channel = _opened(sock, deadline)
        mine = secrets.token_hex(16)
        channel.send({"nonce": mine})
        said = _said(sock, deadline)
        if said is None or not isinstance(said.get("hello"), dict):
            raise Refused("it is no rank")
        nonces = [mine, str(said.get("nonce"))]
        if not _same(said.get("proof"), _proof(token, "rank", *nonces, json.dumps(said["hello"]))):
            refuse(channel, "it has another token than the lead")
            raise Refused("it has another token")
        channel.send({"proof": _proof(token, "lead", *nonces)})
        sock.settimeout(None)
        return channel, said["hello"]
    except BaseException:
        sock.close()
        raise


def refuse(channel: Channel, why: str, for_good: bool = True) -> None:
    """Tells a rank that it is not taken, and ends the connection. for_good: another try would end so, too."""
    with contextlib.suppress(OSError):
        channel.send({"refused": why, "for_good": for_good})
    channel.close()


def connect(host: str, port: int, token: str, hello: Message, wait: float) -> Channel:
    """A rank's side: a connection to the lead, for which it waits so many seconds.

    Raises NoLead where there is none in that time, Refused where the lead does not take this rank or has another
    token.
    """
    deadline = time.monotonic() + wait
    why = ""
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
            channel = _greeted(sock, token, hello)
            if channel is not None:
                sock.settimeout(None)
                return channel
        except OSError:
            # Not there yet, or ended as this came.
            pass
        except ValueError:
            why = ": what answers there is no lead of a gang"
        if time.monotonic() > deadline:
            raise NoLead(f"no lead at {host}:{port} for {wait:g} s{why}")
        time.sleep(RETRY_SECONDS)


def _greeted(sock: socket.socket, token: str, hello: Message) -> Channel | None:
    """The channel when both sides have proved who they are; None where the lead has ended meanwhile.

    Raises ValueError for what no lead sends, Refused, OSError.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    channel = _opened(sock, deadline)
    first = _said(sock, deadline)
    if first is None:
        return None
    nonces = [str(first.get("nonce")), secrets.token_hex(16)]
    proof = _proof(token, "rank", *nonces, json.dumps(hello))
    channel.send({"nonce": nonces[1], "hello": hello, "proof": proof})
    answer = _said(sock, deadline)
    if answer is None:
        return None
    check_taken(answer)
    if not _same(answer.get("proof"), _proof(token, "lead", *nonces)):
        raise Refused("the lead has another token than this rank")
    return channel


def check_taken(message: Message) -> None:
    """Raises Refused where this message of the lead says that a rank is not taken."""
    if "refused" in message:
        raise Refused(str(message["refused"]), bool(message.get("for_good", True)))


def _opened(sock: socket.socket, deadline: float) -> Channel:
    sock.settimeout(max(deadline - time.monotonic(), 0.001))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that vanishes closes nothing: heartbeats notice it, and this does before the first of them.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        # Linux has them all; elsewhere the system's own times hold.
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Channel(sock)


def _said(sock: socket.socket, deadline: float) -> Message | None:
    """The next message of a handshake; None at the end. Raises TimeoutError, ValueError for what is none."""
    line = bytearray()
    # Byte by byte: what follows it is the channel's to read.
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake has taken too long")
        if len(line) == LONGEST_HELLO:
            raise ValueError(f"a message of more than {LONGEST_HELLO} bytes")
        sock.settimeout(left)
        byte = sock.recv(1)
        if not byte:
            return None
        line += byte
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("a message as deep as a well") from None
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message


def _same(said: Any, proof: str) -> bool:
    return hmac.compare_digest(str(said).encode(errors="replace"), proof.encode())


def _proof(token: str, *words: str) -> str:
    return hmac.new(token.encode(), json.dumps(words).encode(), "sha256").hexdigest()

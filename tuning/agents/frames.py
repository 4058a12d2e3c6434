"""Messages between processes: a length and JSON, over a stream that may bring them in pieces.

JSON, not pickles: what an environment's process sends is data, whatever the environment has done to that process.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("!I")
_ADDRESS = " at 0x"
"""In the text of an object that has none of its own; an address is another one in each process."""
PIECE = 1 << 16
"""Bytes that are read at once."""
LONGEST = 1 << 28
"""Bytes of the longest message: beyond it the stream is no stream of messages."""


def packed(message: Any) -> bytes:
    """A message as bytes. Values that JSON does not have become numbers or lists where they can, else text."""
    # ASCII: text of a model may hold halves of surrogate pairs, which UTF-8 has no bytes for.
    body = json.dumps(message, default=plain).encode()
    return _LENGTH.pack(len(body)) + body


def plain(value: Any) -> Any:
    """A value of a library, such as numpy's numbers and arrays, as JSON has it; its text where there is no way."""
    for name in ("tolist", "item"):
        method = getattr(value, name, None)
        if callable(method):
            return method()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    text = str(value)
    return type(value).__name__ if _ADDRESS in text else text


def state(value: Any) -> Any:
    """What an environment says of its state, as JSON: equal where it is in an equal place.

    Raises TypeError for an object that has no text but its address: all states would be the same one.
    """

    def known(part: Any) -> Any:
        found = plain(part)
        if isinstance(found, str) and _ADDRESS in str(part):
            raise TypeError(
                f'info["state"] holds an object of type {found}, which has no text of its own: expected numbers, text, '
                "lists and dicts of these, or an object with __str__"
            )
        return found

    return json.loads(json.dumps(value, default=known))


class Inbox:
    """What has come of a stream, and the whole messages in it."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, piece: bytes) -> Iterator[Any]:
        """Takes a piece; yields the messages that it completes. Raises ValueError where that is no message."""
        self._bytes += piece
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > LONGEST:
                raise ValueError(f"a message of {length} bytes: at most {LONGEST} are expected")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield json.loads(body)


def receive(stream: socket.socket, inbox: Inbox) -> Any:
    """The next message of a stream with one message on its way at a time; None at its end."""
    while piece := stream.recv(PIECE):
        for message in inbox.add(piece):
            return message
    return None

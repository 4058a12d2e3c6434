"""Messages between processes: lines of JSON.

JSON, not pickles: an answer of a child is data, whatever a reward or an environment has done to its process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

ADDRESS = " at 0x"
"""Part of the text of an object without a text of its own; the address differs in each process."""
PIECE = 1 << 16
"""Bytes of one read."""
LONGEST = 1 << 28
"""Bytes of the longest message."""


def pack(message: Any) -> bytes:
    """Encode a message. Values outside JSON become numbers or lists if they can, else text."""
    # ASCII: text of a model may hold halves of surrogate pairs, which UTF-8 cannot encode.
    return json.dumps(message, default=plain).encode() + b"\n"


def plain(value: Any) -> Any:
    """Convert a value of a library, such as a numpy array, to JSON; its text if there is no other way."""
    for name in ("tolist", "item"):
        method = getattr(value, name, None)
        if callable(method):
            return method()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    text = str(value)
    return type(value).__name__ if ADDRESS in text else text


class Inbox:
    """Collects the pieces of a stream into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, piece: bytes) -> Iterator[Any]:
        """Yield the messages that a piece completes. Raises ValueError or RecursionError for invalid JSON."""
        self._bytes += piece
        if b"\n" in piece:
            *lines, rest = self._bytes.split(b"\n")
            self._bytes = rest
            yield from map(json.loads, lines)
        if len(self._bytes) > LONGEST:
            raise ValueError(f"a message has more than {LONGEST} bytes")

"""Lines of a journal with a checksum each: one that a kill has cut off or a disk has changed is left out."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def write_line(file: BinaryIO, text: str) -> None:
    """Adds a line of JSON to a file that is open for appending, and gives it to the system: a kill loses none of it."""
    data = text.encode()
    # A line begins with its end: the one before may be cut off.
    file.write(b"\n%08x %s" % (zlib.crc32(data), data))
    file.flush()


def read_lines(path: Path) -> Iterator[Any]:
    """The values of the whole lines of a file, if there is one; one at a time, since a file may have gigabytes."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            checksum, _, data = line.rstrip(b"\n").partition(b" ")
            if checksum == b"%08x" % zlib.crc32(data):
                yield json.loads(data)

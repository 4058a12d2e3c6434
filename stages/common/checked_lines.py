"""Journal lines with a checksum: readers skip a line that a kill has cut off or a disk has changed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def write_line(file: BinaryIO, text: str) -> None:
    """Append a line of JSON to an open file and flush it, so that a kill cannot lose it."""
    data = text.encode()
    # The newline comes first, because the previous line may be cut off.
    file.write(b"\n%08x %s" % (zlib.crc32(data), data))
    file.flush()


def read_lines(path: Path) -> Iterator[Any]:
    """Yield the values of the whole lines of a file, if it exists; a file may have gigabytes."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            checksum, _, data = line.rstrip(b"\n").partition(b" ")
            if checksum == b"%08x" % zlib.crc32(data):
                yield json.loads(data)

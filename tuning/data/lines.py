"""Records of a stream, read one by one with a limit of `LONGEST`, so that a decompressed file never fills memory.

`json` reads a whole list and `csv` a whole unclosed cell; streaming JSON parsers are not among the dependencies.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator
from typing import Any

LONGEST = 2**26
"""Maximum bytes of a record. A file without line ends would otherwise be held whole, decompressed."""
READ = 1 << 20


def whole_lines(file: Any, size: int) -> Iterator[bytes]:
    """Yield the content of a binary file in blocks that end with a line: about `size` bytes, or one longer line.

    Raises ValueError if a line is longer than `LONGEST`.
    """
    pending, held, number = list[bytes](), 0, 1
    while block := file.read(min(size, LONGEST)):
        cut = block.rfind(b"\n") + 1
        if held + (block.find(b"\n") if cut else len(block)) > LONGEST:
            raise ValueError(f"line {number} is longer than {LONGEST} bytes: end each record with a newline")
        if not cut:
            pending.append(block)
            held += len(block)
            continue
        number += block.count(b"\n")
        yield b"".join([*pending, block[:cut]])
        pending, held = ([block[cut:]], len(block) - cut) if cut < len(block) else ([], 0)
    if pending:
        yield b"".join(pending)


def text_lines(text: Any) -> Iterator[str]:
    """Yield the lines of a text file with their ends. Raises ValueError as `whole_lines` does."""
    number = 1
    while line := text.readline(LONGEST + 1):
        if len(line) > LONGEST:
            raise ValueError(f"line {number} is longer than {LONGEST} characters: end each record with a newline")
        yield line
        number += 1


def csv_rows(text: Any, delimiter: str) -> Iterator[dict[str, str] | list[str]]:
    """Yield the rows of a CSV file as objects with the header's names.

    A row with more or fewer cells than the header is a list, which `parse_record` rejects. Raises ValueError for a
    header that names a column twice, and for an unpaired quotation mark, which would take all later rows into its cell.
    """
    csv.field_size_limit(LONGEST)
    rows, line = csv.reader(text_lines(text), delimiter=delimiter, strict=True), 1
    try:
        header = next(rows, [])
        if len(set(header)) < len(header):
            raise ValueError(f"the first line names a column twice: {header}")
        line = rows.line_num + 1
        for cells in rows:
            if cells:
                yield dict(zip(header, cells, strict=True)) if len(cells) == len(header) else cells
            line = rows.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"the row that begins in line {line} has an unpaired quotation mark ({error}); a cell that begins with one "
            "ends with one, and a mark within the cell is doubled"
        ) from None


class _Text:
    """Text that was read from a UTF-8 stream and not yet consumed."""

    def __init__(self, stream: Any):
        self._stream, self._decoder = stream, codecs.getincrementaldecoder("utf-8-sig")()
        self.held, self.at, self.ended = "", 0, False

    def more(self) -> None:
        """Read as much again as is held, so that repeated parsing does not take quadratic time."""
        held = self.held[self.at :]
        block = self._stream.read(max(READ, len(held)))
        self.ended = not block
        self.held, self.at = held + self._decoder.decode(block, self.ended), 0

    def next(self) -> str:
        """Return the next character that is not a space, without consuming it; "" at the end."""
        while True:
            while self.at < len(self.held) and self.held[self.at] in " \t\r\n":
                self.at += 1
            if self.at < len(self.held) or self.ended:
                return self.held[self.at : self.at + 1]
            self.more()


def json_values(stream: Any) -> Iterator[Any]:
    """Yield the elements of one JSON list, or one value. Raises ValueError for invalid JSON or above `LONGEST`."""
    text, number = _Text(stream), 1
    if text.next() != "[":
        yield _value(text, number)
        _end(text)
        return
    text.at += 1
    if text.next() == "]":
        text.at += 1
    else:
        while True:
            yield _value(text, number)
            mark, number = text.next(), number + 1
            text.at += 1
            if mark == "]":
                break
            if mark != ",":
                raise ValueError(f"expected a comma before element {number} of its list, got {mark!r}")
    _end(text)


def _value(text: _Text, number: int) -> Any:
    """Consume and return the next value."""
    text.next()
    while True:
        try:
            value, end = json.JSONDecoder().raw_decode(text.held, text.at)
            # A number may continue in unread text.
            if end < len(text.held) or text.ended:
                text.at = end
                return value
        except json.JSONDecodeError as error:
            if text.ended:
                raise ValueError(f"element {number} of its list is not valid JSON: {error.msg}") from error
            if len(text.held) - text.at > LONGEST:
                raise ValueError(f"element {number} of its list is invalid, or longer than {LONGEST} bytes") from error
        text.more()


def _end(text: _Text) -> None:
    if mark := text.next():
        raise ValueError(f"expected nothing after the end of its JSON, got {mark!r}")

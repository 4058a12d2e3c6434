"""Records of a stream one by one, none larger than `LONGEST`: memory does not grow with what a file unpacks to."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator
from typing import Any

LONGEST = 2**26
"""Bytes of a record. A file whose lines do not end would else be held whole, unpacked."""
READ = 1 << 20


def whole_lines(file: Any, size: int) -> Iterator[bytes]:
    """The content of a binary file in blocks that end with a line: about `size` bytes, or one line that is longer.

    Raises ValueError where a line is longer than `LONGEST`.
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
    """The lines of a text file with their ends. Raises ValueError as `whole_lines` does."""
    number = 1
    while line := text.readline(LONGEST + 1):
        if len(line) > LONGEST:
            raise ValueError(f"line {number} is longer than {LONGEST} characters: end each record with a newline")
        yield line
        number += 1


def csv_rows(text: Any, delimiter: str) -> Iterator[dict[str, str] | list[str]]:
    """The rows of a text file of CSV, as objects with the header's names.

    A row with more or fewer cells than the header is a list, which `parse_record` rejects. Raises ValueError for a
    header that names a column twice, and for marks of quotation that do not pair: one that nothing closes would take
    all later rows into its cell.
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
    """What has been read of a stream of UTF-8 and not been taken."""

    def __init__(self, stream: Any):
        self._stream, self._decoder = stream, codecs.getincrementaldecoder("utf-8-sig")()
        self.held, self.at, self.ended = "", 0, False

    def more(self) -> None:
        """Reads as much again as is held, so that trying again and again takes no quadratic time."""
        held = self.held[self.at :]
        block = self._stream.read(max(READ, len(held)))
        self.ended = not block
        self.held, self.at = held + self._decoder.decode(block, self.ended), 0

    def next(self) -> str:
        """The next character that is no space, not taken; "" at the end."""
        while True:
            while self.at < len(self.held) and self.held[self.at] in " \t\r\n":
                self.at += 1
            if self.at < len(self.held) or self.ended:
                return self.held[self.at : self.at + 1]
            self.more()


def json_values(stream: Any) -> Iterator[Any]:
    """The elements of one JSON list, or one value. Raises ValueError for what is none, and above `LONGEST` each."""
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
                raise ValueError(f"element {number} of its list is not behind a comma: it begins with {mark!r}")
    _end(text)


def _value(text: _Text, number: int) -> Any:
    """The next value, which is taken."""
    text.next()
    while True:
        try:
            value, end = json.JSONDecoder().raw_decode(text.held, text.at)
            # A number may go on in what has not been read.
            if end < len(text.held) or text.ended:
                text.at = end
                return value
        except json.JSONDecodeError as error:
            if text.ended:
                raise ValueError(f"element {number} of its list is no JSON: {error.msg}") from error
            if len(text.held) - text.at > LONGEST:
                raise ValueError(f"element {number} of its list is no JSON, or longer than {LONGEST} bytes") from error
        text.more()


def _end(text: _Text) -> None:
    if mark := text.next():
        raise ValueError(f"{mark!r} stands behind its end")

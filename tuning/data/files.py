"""Files of records: listing them, splitting them into parts and reading a part.

JSON Lines, JSON (a list of objects) and CSV, each also compressed, Parquet and Arrow (and folders of Hugging Face
`datasets`), from a path, a folder, a glob or an fsspec URL. One worker reads a part: a range of bytes or row groups.
Files that cannot be read from the middle (compressed text, CSV, JSON lists, Arrow, servers without ranges) are first
spooled: converted to compressed pieces of JSON Lines, one for each part.

    a.jsonl    |--- part ---|--- part ---|-- part --|      byte ranges, each ending with a line
    b.parquet  |group|group| |group|group| |group|         ranges of row groups

Records of a stream are read one by one with a limit of `LONGEST`, so that a decompressed file never fills memory.
`json` reads a whole list and `csv` a whole unclosed cell; streaming JSON parsers are not among the dependencies.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import datetime
import decimal
import hashlib
import io
import json
import re
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf.tuning import digest_cache
from rlhf.tuning.data.folders import check_one_split, files_of
from rlhf.tuning.data.remote import SourceError, again, filesystem, open_input, publish, read_range, type_of

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
        yield _json_value(text, number)
        _check_end(text)
        return
    text.at += 1
    if text.next() == "]":
        text.at += 1
    else:
        while True:
            yield _json_value(text, number)
            mark, number = text.next(), number + 1
            text.at += 1
            if mark == "]":
                break
            if mark != ",":
                raise ValueError(f"expected a comma before element {number} of its list, got {mark!r}")
    _check_end(text)


def _json_value(text: _Text, number: int) -> Any:
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


def _check_end(text: _Text) -> None:
    if mark := text.next():
        raise ValueError(f"expected nothing after the end of its JSON, got {mark!r}")


KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
SUFFIXES = (*KINDS, *(kind + packed for kind in (".jsonl", ".json", ".csv", ".tsv") for packed in COMPRESSIONS))
# Protocols with byte ranges; files of `memory:` are private to a process.
_RANGES = {"file", "local", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "hf"}


@dataclasses.dataclass(frozen=True)
class DataFile:
    """One file of a source; `label` names it in messages and provenance."""

    url: str
    label: str

    @property
    def compression(self) -> str | None:
        return COMPRESSIONS.get("." + self.url.rsplit(".", 1)[-1].lower())

    @property
    def suffix(self) -> str:
        name = self.url.rsplit("/", 1)[-1].lower()
        return "." + name.split(".")[-2 if self.compression else -1]

    @property
    def kind(self) -> str:
        return KINDS[self.suffix]

    @property
    def ranges(self) -> bool:
        """Whether any process can read any range of the file."""
        return not self.compression and ("://" not in self.url or self.url.partition("://")[0] in _RANGES)


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a source that one worker reads: bytes [start, stop), or row groups or record batches [start, stop)."""

    source: int
    """Which of the recipe's sources."""
    url: str
    label: str
    kind: str
    start: int
    stop: int
    number: int
    """Number of the first record in its file, from 1."""
    position: int
    """Place of the first record among all records of all sources, from 0."""
    count: int
    """Records, blank lines included."""
    size: int
    """Size in bytes, uncompressed."""
    checksum: int
    """CRC-32 of the bytes [start, stop); for row groups, of the sizes of all row groups of the file."""
    strings: bool = False
    """All values are text, as in CSV."""


def is_files(source: str) -> bool:
    """Return whether the name of a source means files rather than a task or function."""
    return "://" in source or "/" in source or source.lower().endswith(SUFFIXES) or Path(source).is_dir()


def expand(source: str) -> list[DataFile]:
    """Return the files of a path, folder, glob or URL, in the order of their names.

    Raises SourceError if there are none, or if they are files of several splits.
    """
    fs, path = filesystem(source)
    http = source.startswith(("http:", "https:"))
    # In a web address `?` begins the query, and brackets occur in names.
    pattern = any(mark in path for mark in ("*" if http else "*?["))
    # An existing path is not a pattern, whatever its characters.
    kind = None if http and pattern else type_of(fs, path, source)
    # Over HTTP every address can be listed and read.
    if kind == "directory" and not http:
        paths = files_of(fs, path.rstrip("/"), source, SUFFIXES)
    elif kind is not None:
        paths = [path]
    else:
        listed = again(lambda: fs.glob(path, detail=True), source) if pattern else {}
        paths = [name for name, info in listed.items() if info["type"] == "file"]
    if not paths:
        why = "no file matches the pattern; write [[] for a bracket of a name" if pattern else "no such file"
        why += "" if "://" in source or Path(source).is_absolute() else f" in {Path.cwd()}"
        raise SourceError(f"source {source!r}: {why}")
    check_one_split(paths, source)
    urls = sorted(fs.unstrip_protocol(name) if "://" in source else name for name in paths)
    for url in urls:
        if not url.lower().endswith(SUFFIXES):
            raise SourceError(f"{url}: expected a file ending in {', '.join(SUFFIXES)}")
    names = [url.rsplit("/", 1)[-1] for url in urls]
    labels = names if len(set(names)) == len(names) else urls
    return [DataFile(url, label) for url, label in zip(urls, labels, strict=True)]


def file_digest(url: str) -> str:
    """Return the sha256 of a file's bytes."""

    def read() -> str:
        sha = hashlib.sha256()
        with open_input(url) as file:
            while block := file.read(READ):
                sha.update(block)
        return sha.hexdigest()

    if "://" not in url:
        return digest_cache.of_file(url, read)
    # Elsewhere a tag need not follow the content.
    if not url.startswith(("s3://", "gs://", "gcs://")):
        return read()
    fs, path = filesystem(url)
    return digest_cache.of_object(url, again(lambda: fs.info(path), url), read)


def parts_of(file: DataFile, part_bytes: int, spool: str, source: int = 0, position: int = 0) -> Iterator[Part]:
    """Split a file into parts of about `part_bytes`; `position` is the place of its first record.

    Reads the file once. `spool` is the folder or URL for pieces. Raises SourceError, naming the file, if that fails.
    """
    try:
        if file.kind == "lines" and file.ranges:
            yield from _cut_lines(file, part_bytes, source, position)
        elif file.kind == "parquet" and file.ranges:
            yield from _cut_groups(file, part_bytes, source, position)
        else:
            lines = _PIECES[file.kind](file)
            yield from spooled(lines, file.label, part_bytes, spool, source, position, file.kind == "csv")
    except (OSError, EOFError, ValueError, RecursionError, pa.ArrowException) as error:
        if isinstance(error, SourceError | FileNotFoundError):
            raise
        raise SourceError(f"{file.url} cannot be read as {file.suffix}: {error}") from error


def _count(block: bytes) -> int:
    return block.count(b"\n") + (not block.endswith(b"\n"))


def _cut_lines(file: DataFile, part_bytes: int, source: int, position: int) -> Iterator[Part]:
    start, number = 0, 1
    with open_input(file.url) as stream:
        for block in whole_lines(stream, part_bytes):
            count = _count(block)
            yield Part(
                *(source, file.url, file.label, "lines", start, start + len(block), number, position),
                *(count, len(block), zlib.crc32(block)),
            )
            start, number, position = start + len(block), number + count, position + count


def _groups(file: DataFile) -> tuple[list[tuple[int, int]], int]:
    """Return (rows, bytes) of each row group of a Parquet file, and a checksum of that list."""
    import pyarrow.parquet as pq

    with open_input(file.url) as stream:
        metadata = pq.ParquetFile(stream).metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    sizes = [(group.num_rows, group.total_byte_size) for group in groups]
    return sizes, zlib.crc32(repr(sizes).encode())


def _cut_groups(file: DataFile, part_bytes: int, source: int, position: int) -> Iterator[Part]:
    sizes, checksum = _groups(file)
    number, start, rows, size = 1, 0, 0, 0
    for i, (count, weight) in enumerate(sizes):
        rows, size = rows + count, size + weight
        if size >= part_bytes or i + 1 == len(sizes):
            yield Part(
                *(source, file.url, file.label, file.kind, start, i + 1, number, position, rows, size, checksum),
            )
            number, position, start, rows, size = number + rows, position + rows, i + 1, 0, 0


def spooled(
    lines: Iterable[bytes], label: str, part_bytes: int, spool: str, source: int, position: int, strings: bool = False
) -> Iterator[Part]:
    """Yield the parts of a stream of records: each is a compressed piece of JSON Lines below `spool`."""
    number = 1
    for piece, block in enumerate(_gather(lines, part_bytes)):
        data, url = b"".join(block), f"{spool}/{source:03d}-{_name(label)}-{piece:05d}.jsonl.zst"
        publish(url, pa.compress(data, codec="zstd", asbytes=True))
        yield Part(
            *(source, url, label, "spooled", 0, len(data), number, position),
            *(len(block), len(data), zlib.crc32(data), strings),
        )
        number, position = number + len(block), position + len(block)


def _gather(lines: Iterable[bytes], part_bytes: int) -> Iterator[list[bytes]]:
    block, size = list[bytes](), 0
    for line in lines:
        block.append(line + b"\n")
        size += len(line)
        if size >= part_bytes:
            yield block
            block, size = [], 0
    if block:
        yield block


def _name(label: str) -> str:
    return hashlib.sha256(label.encode()).hexdigest()[:12]


def _stream(file: DataFile) -> Any:
    stream = open_input(file.url)
    return io.BufferedReader(pa.CompressedInputStream(stream, file.compression)) if file.compression else stream


def _lines(file: DataFile) -> Iterator[bytes]:
    with _stream(file) as stream:
        yield from _split_stream(stream)


def _split_stream(stream: Any) -> Iterator[bytes]:
    """Yield lines without their newlines; carriage returns stay, and `read_part` strips them."""
    for block in whole_lines(stream, READ):
        yield from block.removesuffix(b"\n").split(b"\n")


def _json_list(file: DataFile) -> Iterator[bytes]:
    """Yield the elements of one JSON list, or one object over several lines; the file may hold JSON Lines as well."""
    with _stream(file) as stream:
        if not re.match(rb"(\xef\xbb\xbf)?\s*(\[|\{\s*\n)", stream.peek(1 << 12)):
            yield from _split_stream(stream)
            return
        for element in json_values(stream):
            yield json.dumps(element).encode()


def _csv_rows(file: DataFile) -> Iterator[bytes]:
    delimiter = "\t" if file.suffix == ".tsv" else ","
    with _stream(file) as stream:
        # A byte that is not UTF-8 becomes a lone surrogate, so that one record is dead, not the file.
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        for row in csv_rows(text, delimiter):
            yield json.dumps(row).encode()


def _parquet_rows(file: DataFile, groups: range | None = None) -> Iterator[bytes]:
    import pyarrow.parquet as pq

    with open_input(file.url) as stream:
        for batch in pq.ParquetFile(stream).iter_batches(batch_size=1024, row_groups=groups):
            yield from batch_lines(batch)


def _arrow_rows(file: DataFile) -> Iterator[bytes]:
    with open_input(file.url) as source:
        # The magic bytes of the file format, which has an index of batches; the stream format has neither.
        file_format = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pa.ipc.open_file(source) if file_format else pa.ipc.open_stream(source)
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if file_format else reader:
            for offset in range(0, batch.num_rows, 1024):
                yield from batch_lines(batch.slice(offset, 1024))


_PIECES: dict[str, Callable[[DataFile], Iterator[bytes]]] = {
    "lines": _lines,
    "json": _json_list,
    "csv": _csv_rows,
    "parquet": _parquet_rows,
    "arrow": _arrow_rows,
}


def records_of(file: DataFile) -> Iterator[bytes]:
    """Yield the JSON of each record of a file; a line without a record is empty or white space."""
    return _PIECES[file.kind](file)


def read_part(part: Part) -> Iterator[tuple[int, bytes]]:
    """Yield (number in the file, JSON) of each record of a part; blank lines are skipped but counted.

    Raises SourceError if the file has changed since it was split.
    """
    if part.kind in ("lines", "spooled"):
        data = read_range(part.url, part.start, part.stop) if part.kind == "lines" else _spooled(part)
        if zlib.crc32(data) != part.checksum:
            raise SourceError(f"{part.url} was changed while it was read: run again")
        for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), part.number):
            if stripped := line.strip():
                yield number, stripped
        return
    file = DataFile(part.url, part.label)
    if _groups(file)[1] != part.checksum:
        raise SourceError(f"{part.url} was changed while it was read: run again")
    yield from enumerate(_parquet_rows(file, range(part.start, part.stop)), part.number)


def _spooled(part: Part) -> bytes:
    fs, path = filesystem(part.url)
    return pa.decompress(again(lambda: fs.cat_file(path), part.url), part.stop, "zstd", asbytes=True)


def upload(local: str, url: str) -> str:
    """Copy a local file or folder to a URL that other machines can read; returns `url`."""
    fs, path = filesystem(url)
    # With slashes the content is copied, whether the folder exists or not.
    end = "/" if Path(local).is_dir() else ""
    again(lambda: fs.put(f"{local}{end}", f"{path}{end}", recursive=True), url)
    return url


def batch_lines(batch: pa.RecordBatch) -> Iterator[bytes]:
    """Yield the JSON of each row.

    Bytes are text in UTF-8 and maps are objects. Dates, times, decimals and UUIDs, which JSON does not have, become
    text. Null fields of structs in lists are left out, because such structs have the fields of all rows, such as the
    arguments of calls of different tools. Raises ValueError for a value of another type.
    """
    readers = {field.name: reader for field in batch.schema if (reader := _by_text(field.type)) is not None}
    for row in batch.to_pylist(maps_as_pydicts="strict"):
        row |= {name: read(row[name]) for name, read in readers.items()}
        yield json.dumps(_without_nulls(row), default=_as_text).encode()


LARGEST_WHOLE = 1e15


def _by_text(given: pa.DataType) -> Callable[[Any], Any] | None:
    """Return what reads a value of the type with each float of 16 or 32 bits as the number that its text is.

    Else 0.1 would have the decimals of its bits. None where the type has no such floats.
    """
    is_half, types = pa.types.is_float16(given), pa.types
    if is_half or types.is_float32(given):
        kind = np.float16 if is_half else np.float32

        def number(value: float | None) -> float | None:
            # A whole number is stored as it is, up to a size that no text would write out.
            exact = value is None or (abs(value) < LARGEST_WHOLE and value == round(value))
            return value if exact else float(str(kind(value)))

        return number
    if isinstance(given, pa.BaseExtensionType):
        return _by_text(given.storage_type)
    if types.is_struct(given):
        fields = {field.name: read for field in given if (read := _by_text(field.type)) is not None}
        return (lambda value: value and value | {n: read(value[n]) for n, read in fields.items()}) if fields else None
    of_values = types.is_dictionary(given) or types.is_run_end_encoded(given)
    if not of_values and not types.is_map(given) and not any(is_list(given) for is_list in _LISTS):
        return None
    inner = _by_text(given.item_type if types.is_map(given) else given.value_type)
    if inner is None or of_values:
        return inner
    if types.is_map(given):
        return lambda value: value and {n: inner(one) for n, one in value.items()}
    return lambda value: value and list(map(inner, value))


_LISTS = (
    pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view,
    pa.types.is_large_list_view,
)  # fmt: skip


def _without_nulls(value: Any, within: bool = False) -> Any:
    """Return the value without null fields inside lists; other null fields stay, since a reward may read them."""
    if isinstance(value, dict):
        return {name: _without_nulls(one, within) for name, one in value.items() if one is not None or not within}
    return [_without_nulls(one, True) for one in value] if isinstance(value, list) else value


def _as_text(value: Any) -> str:
    match value:
        case bytes():
            # A byte that is not UTF-8 becomes a lone surrogate, so that one record is dead, not the file.
            return value.decode("utf-8", "surrogateescape")
        case decimal.Decimal():
            return format(value, "f")
        case datetime.date() | datetime.time() | datetime.timedelta() | uuid.UUID():
            return str(value)
    raise ValueError(f"expected values that have a form in JSON, got {type(value).__name__} {value!r:.60}")

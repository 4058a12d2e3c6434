"""Reading from any fsspec file system, with retries after errors of the network.

`open_input` returns a file object that reopens its file after an error and continues at the same byte. Readers on top
of it (decompression, CSV, Parquet) see one complete stream, or one error that names the file.
"""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from rlhf.tuning.atomic import whole_file
from rlhf.tuning.extras import remedy
from rlhf.tuning.retries import retried

T = TypeVar("T")

# Pauses of 0.2, 0.4, ..., 3.2 s: some six seconds in all.
TRIES = 6
FIRST_WAIT_SECONDS = 0.2
# Errors that a repeated call would raise again; the last two are programming errors.
_FINAL = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError),
    *(TypeError, AttributeError),
)
_BUFFER_BYTES = 1 << 20


class SourceError(ValueError):
    """A source that is missing or cannot be read; the message names the remedy."""


def filesystem(url: str) -> tuple[Any, str]:
    """Return file system and path of a URL or local path."""
    # A cached listing would not show files that another process has written since.
    remote = "://" in url and not url.startswith(("file:", "local:", "memory:"))
    try:
        return fsspec.core.url_to_fs(url, **({"use_listings_cache": False} if remote else {}))  # type: ignore[no-any-return]
    except (ImportError, ValueError) as error:
        said = remedy(url, error) if isinstance(error, ImportError) else error
        raise SourceError(f"{url}: {said}") from error


def again(action: Callable[[], T], what: str) -> T:
    """Return the result of `action`, called up to TRIES times with pauses that double. Errors name `what`."""
    try:
        # Every file system has its own exceptions, so each one is transient unless it is clearly the caller's fault.
        return retried(
            action,
            tries=TRIES,
            first_seconds=FIRST_WAIT_SECONDS,
            passing=lambda error: not isinstance(error, _FINAL),
        )
    except _FINAL:
        raise
    except Exception as error:
        raise SourceError(f"{what}: no success in {TRIES} tries; the last error: {error!r}") from error


def type_of(fs: Any, path: str, what: str) -> str | None:
    """Return "file", "directory", or None if nothing exists."""

    def info() -> Any:
        try:
            return fs.info(path)
        except FileNotFoundError as error:
            # Over HTTP any failure is called a missing file.
            if error.__cause__ is None or isinstance(error.__cause__, FileNotFoundError):
                raise
            raise error.__cause__ from None

    # `fs.exists` and `fs.isdir` return False on any error, including network errors.
    try:
        return str(again(info, what)["type"])
    except FileNotFoundError:
        return None


class _Resuming(io.RawIOBase):
    """A file of known size that is reopened after an error and resumes at the same byte."""

    def __init__(self, fs: Any, path: str, url: str, size: int) -> None:
        self.fs, self.path, self.url, self.size = fs, path, url, size
        self.at = 0
        self.file: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self.size - self.at)
        if wanted <= 0:
            return 0
        data = again(functools.partial(self._read, wanted), self.url)
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)

    def _read(self, wanted: int) -> bytes:
        try:
            if self.file is None:
                self.file = self.fs.open(self.path, "rb")
            # The position is kept here, so a new file object continues where the last one failed.
            self.file.seek(self.at)
            data: bytes = self.file.read(wanted)
            if not data:
                # An early end is a broken connection: without an error it would look like a shorter file.
                raise OSError(f"the file ends at byte {self.at} of {self.size}")
            return data
        except Exception:
            self._drop()
            raise

    def _drop(self) -> None:
        with contextlib.suppress(Exception):
            if self.file is not None:
                self.file.close()
        self.file = None

    def close(self) -> None:
        self._drop()
        super().close()


def open_input(url: str) -> Any:
    """Open a buffered file of bytes. It is seekable and resumes after errors, unless its size is unknown.

    Raises FileNotFoundError, or SourceError after repeated errors.
    """
    fs, path = filesystem(url)
    size = again(lambda: fs.size(path), url)
    if size is None:
        return again(lambda: fs.open(path, "rb"), url)
    return io.BufferedReader(_Resuming(fs, path, url, int(size)), _BUFFER_BYTES)


def read_range(url: str, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of a file. Raises SourceError if it has fewer."""
    with open_input(url) as file:
        file.seek(start)
        data: bytes = file.read(stop - start)
    if len(data) != stop - start:
        raise SourceError(f"{url} has no bytes {start} to {stop}: it was changed while it was read")
    return data


def publish(url: str, data: bytes) -> None:
    """Write a file that is visible only when it is complete."""
    fs, path = filesystem(url)
    if "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
        with whole_file(Path(path)) as partial:
            partial.write_bytes(data)
        return
    # Object stores show an object only after its upload is complete.
    again(lambda: fs.pipe_file(path, data), url)


def remove_folder(url: str) -> None:
    """Remove a folder and its contents if it exists. Errors name it."""
    fs, path = filesystem(url)
    try:
        again(lambda: fs.rm(path, recursive=True), url)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SourceError(f"{url}: {error}") from error


def local_copy(url: str) -> str:
    """Return the local path of a file or folder: `url` itself, or a copy that each process downloads once and removes
    at its end."""
    return _copy(url)[0] if "://" in url else url


@functools.cache
def _copy(url: str) -> tuple[str, tempfile.TemporaryDirectory[str]]:
    fs, path = filesystem(url)
    folder = tempfile.TemporaryDirectory(prefix="rlhf-copy-", ignore_cleanup_errors=True)
    target = f"{folder.name}/{path.rstrip('/').rsplit('/', 1)[-1]}"

    def get() -> None:
        # Into an existing folder, such as one of a failed try, fsspec copies a folder one level deeper.
        shutil.rmtree(target, ignore_errors=True)
        fs.get(path, target, recursive=True)

    again(get, url)
    return target, folder

"""A file system in memory that is far away: `distant://NAME` counts its calls and bytes, and each takes its time."""

from __future__ import annotations

import threading
import time
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Distant(MemoryFileSystem):
    """Each request takes `seconds`; several may be under way at a time."""

    protocol = "distant"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    seconds = 0.0
    requests = 0
    bytes_written = 0
    _counting = threading.Lock()

    @classmethod
    def begin(cls, seconds: float = 0.0) -> None:
        """Counts from 0 again."""
        cls.seconds, cls.requests, cls.bytes_written = seconds, 0, 0

    @classmethod
    def _request(cls, written: int = 0) -> None:
        with cls._counting:
            cls.requests += 1
            cls.bytes_written += written
        time.sleep(cls.seconds)

    def cat_file(self, path: str, *rest: Any, **named: Any) -> Any:
        self._request()
        return super().cat_file(path, *rest, **named)

    def find(self, path: str, *rest: Any, **named: Any) -> Any:
        self._request()
        return super().find(path, *rest, **named)

    def ls(self, path: str, *rest: Any, **named: Any) -> Any:
        self._request()
        return super().ls(path, *rest, **named)

    def info(self, path: str, **named: Any) -> Any:
        self._request()
        return super().info(path, **named)

    def exists(self, path: str, **named: Any) -> Any:
        self._request()
        return super().exists(path, **named)

    def pipe_file(self, path: str, value: bytes, *rest: Any, **named: Any) -> Any:
        self._request(len(value))
        return super().pipe_file(path, value, *rest, **named)


fsspec.register_implementation("distant", Distant, clobber=True)

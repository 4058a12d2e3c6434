"""An object store in memory that is far away: `distant://NAME` counts its requests and bytes, and each takes its time.

Folders are what the names of objects imply, as on S3, and are indexed: a request costs by what it answers, not by what
else the store holds.
"""

import datetime
import io
import threading
import time
from collections.abc import Iterator
from typing import Any

import fsspec
from fsspec import AbstractFileSystem


class Distant(AbstractFileSystem):
    """Each request takes `seconds`; several may be under way at a time."""

    protocol = "distant"
    root_marker = "/"
    seconds = 0.0
    requests = 0
    bytes_written = 0
    _objects: dict[str, tuple[bytes, float]] = {}
    _folders: dict[str, dict[str, None]] = {}
    _lock = threading.Lock()

    @classmethod
    def begin(cls, seconds: float = 0.0) -> None:
        """Counts from 0 again."""
        cls.seconds, cls.requests, cls.bytes_written = seconds, 0, 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/" + str(path).removeprefix("distant://").strip("/")

    def _request(self, path: str, written: int = 0) -> str:
        with self._lock:
            Distant.requests += 1
            Distant.bytes_written += written
        time.sleep(self.seconds)
        return self._strip_protocol(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **named: Any) -> bytes:
        path = self._request(path)
        if path not in self._objects:
            raise FileNotFoundError(path)
        return self._objects[path][0][start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **named: Any) -> None:
        path = self._request(path, len(value))
        with self._lock:
            if mode == "create" and path in self._objects:
                raise FileExistsError(path)
            self._objects[path] = bytes(value), time.time()
            while path != "/":
                folder, _, name = path.rpartition("/")
                path = folder or "/"
                self._folders.setdefault(path, {})[name] = None

    def rm_file(self, path: str) -> None:
        path = self._request(path)
        with self._lock:
            if self._objects.pop(path, None) is None:
                raise FileNotFoundError(path)
            while path != "/" and path not in self._folders:
                folder, _, name = path.rpartition("/")
                path = folder or "/"
                del self._folders[path][name]
                if not self._folders[path]:
                    del self._folders[path]

    def cp_file(self, path1: str, path2: str, **named: Any) -> None:
        self.pipe_file(path2, self.cat_file(path1))

    def _told(self, path: str) -> dict[str, Any]:
        if path in self._objects:
            value, created = self._objects[path]
            when = datetime.datetime.fromtimestamp(created, datetime.UTC)
            return {"name": path, "size": len(value), "type": "file", "created": when}
        if path in self._folders:
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def info(self, path: str, **named: Any) -> dict[str, Any]:
        path = self._request(path)
        with self._lock:
            return self._told(path)

    def ls(self, path: str, detail: bool = True, **named: Any) -> list[Any]:
        path = self._request(path)
        with self._lock:
            here = self._told(path)
            found = [here]
            if here["type"] == "directory":
                found = [self._told(f"{path.rstrip('/')}/{name}") for name in sorted(self._folders[path])]
        return found if detail else [one["name"] for one in found]

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **named: Any
    ) -> Any:
        path = self._request(path)
        with self._lock:
            told = list(self._below(path))
        found = {one["name"]: one for one in told if withdirs or one["type"] == "file"}
        return found if detail else list(found)

    def _below(self, path: str) -> Iterator[dict[str, Any]]:
        if path in self._objects or path in self._folders:
            yield self._told(path)
        for name in sorted(self._folders.get(path, ())):
            yield from self._below(f"{path.rstrip('/')}/{name}")

    def _open(self, path: str, mode: str = "rb", **named: Any) -> Any:
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        return _Written(self, path, "create" if "x" in mode else "overwrite")


class _Written(io.BytesIO):
    """An object that is there once it is closed."""

    def __init__(self, fs: Distant, path: str, mode: str):
        super().__init__()
        self.fs, self.path, self.as_mode = fs, path, mode

    def close(self) -> None:
        if not self.closed:
            self.fs.pipe_file(self.path, self.getvalue(), self.as_mode)
        super().close()


fsspec.register_implementation("distant", Distant, clobber=True)

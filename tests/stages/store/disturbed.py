"""A file system in memory whose calls fail as those of a store over a network do: `disturbed://NAME`."""

import errno
from collections import deque
from pathlib import Path
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem


class Disturbed(MemoryFileSystem):
    """Calls named in `faults` fail, one for each entry: `before` the call is done, or `after`, with its answer lost; a
    listing may also show `nothing`, and a file arrive with a bit `flipped`."""

    protocol = "disturbed"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    faults: dict[str, deque[str]] = {}
    calls: deque[str] = deque(maxlen=1000)

    @classmethod
    def disturb(cls, **faults: list[str]) -> None:
        cls.faults = {name: deque(kinds) for name, kinds in faults.items()}
        cls.calls.clear()

    def _next(self, name: str) -> str:
        self.calls.append(name)
        return self.faults[name].popleft() if self.faults.get(name) else ""

    def cat_file(self, path: str, *rest: Any, **named: Any) -> Any:
        if self._next("cat_file"):
            raise OSError(errno.EIO, "Input/output error")
        return super().cat_file(path, *rest, **named)

    def info(self, path: str, **named: Any) -> Any:
        if self._next("info"):
            raise OSError(errno.EIO, "Input/output error")
        return super().info(path, **named)

    # As file systems over a network have it: no error is one of a file that is there.
    exists = AbstractFileSystem.exists

    def get_file(self, path: str, target: str, *rest: Any, **named: Any) -> None:
        fault = self._next("get_file")
        super().get_file(path, target, *rest, **named)
        if fault == "flipped":
            data = bytearray(Path(target).read_bytes())
            data[len(data) // 2] ^= 1
            Path(target).write_bytes(data)

    def rm_file(self, path: str) -> None:
        if self._next("rm_file"):
            raise OSError(errno.EIO, "Input/output error")
        super().rm_file(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if self._next("makedirs"):
            raise OSError(errno.EIO, "Input/output error")
        super().makedirs(path, exist_ok)

    def find(self, path: str, *rest: Any, **named: Any) -> Any:
        fault = self._next("find")
        if fault == "nothing":
            return {}
        if fault:
            raise OSError(errno.EIO, "Input/output error")
        return super().find(path, *rest, **named)

    def open(self, path: str, mode: str = "rb", **named: Any) -> Any:
        fault = self._next(f"open_{mode}")
        if fault == "before":
            raise OSError(errno.EIO, "Input/output error")
        file = super().open(path, mode, **named)
        return _Unanswered(file) if fault == "after" else file


class _Unanswered:
    """A file of which the creation is done, and told to be impossible: the client's own second try found it there."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> Any:
        return self._file

    def __exit__(self, *error: Any) -> None:
        self._file.close()
        raise FileExistsError


fsspec.register_implementation("disturbed", Disturbed, clobber=True)

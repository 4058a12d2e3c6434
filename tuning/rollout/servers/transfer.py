"""The files of a policy, which a server reads below a root that it shares with the trainer: a folder or a URL.

A request names a folder below the root and the SHA-256 of each file; a server reads nothing outside its root. vLLM's
workers import this module, so it needs only fsspec and the standard library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*")
COMPLETE = ".complete"


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A policy that servers can read."""

    root: str
    """Folder or fsspec URL."""
    folder: str
    """The policy's folder below it."""
    files: dict[str, str]
    """SHA-256 of each file by its name."""


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in a folder."""
    return {path.name: _sha256(path) for path in sorted(folder.iterdir())}


def pull(root: str, folder: str, files: Mapping[str, str], scratch: Path) -> Path:
    """Return a local folder with the files of a `Transfer`.

    A root that is a folder is read in place. Files of a URL are downloaded to `scratch`, once for all processes that
    share it, and replace those of the previous policy.

    Raises ValueError for a name that is a path, and for a file with another SHA-256.
    """
    for name in (*folder.split("/"), *files):
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid name: expected letters, digits, '.', '_' and '-'")
    fs, path = fsspec.core.url_to_fs(root)
    source = f"{path}/{folder}"
    if isinstance(fs, LocalFileSystem):
        _check(Path(source), files)
        return Path(source)
    with _locked(scratch):
        target = scratch / hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]
        if not (target / COMPLETE).exists():
            for old in scratch.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            target.mkdir()
            for name in files:
                fs.get_file(f"{source}/{name}", str(target / name))
            _check(target, files)
            (target / COMPLETE).touch()
    return target


def _check(folder: Path, files: Mapping[str, str]) -> None:
    for name, wanted in files.items():
        found = _sha256(folder / name)
        if found != wanted:
            raise ValueError(
                f"{folder / name} has SHA-256 {found[:12]}, expected {wanted[:12]}: write the policy again"
            )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: remove it")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

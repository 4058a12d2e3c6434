"""Named data sets with versions in the store.

    <store>/datasets/NAME/000001-1a2b3c4d/   the files of the first version
    <store>/datasets/NAME/000001.json        the version: its folder, files, checksums, who stored it and when

A version is complete when its JSON file exists, and never changes. In a recipe `source: dataset:NAME` is the newest
version when the recipe is read, and `dataset:NAME@2` the second.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from rlhf.stages.store import disk, pins, readonly, transfers
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.exclusive import create
from rlhf.stages.store.keys import digest
from rlhf.tuning.atomic import whole_file
from rlhf.tuning.names import closest

FOLDER = "datasets"
PREFIX = "dataset:"
TRIES = 10
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_FILE = re.compile(r"(\d{6,})\.json")


class DatasetError(ValueError):
    """An unknown or invalid name, version or file; the message has the remedy."""


@dataclasses.dataclass(frozen=True)
class Version:
    """A version of a named data set."""

    name: str
    number: int
    folder: str
    """Name of the folder with its files."""
    files: Mapping[str, str]
    """SHA-256 (hex) of each file by its path in the folder."""
    who: str
    when: str


VERSION = TypeAdapter(Version)


def add(store: Store, name: str, paths: Sequence[Path]) -> tuple[Version, bool]:
    """Store files, and those below folders, as the next version of a name; return it and whether it is new.

    Equal files are no new version. Raises DatasetError for two files of one name and for a file that changes meanwhile.
    """
    if not _NAME.fullmatch(name):
        raise DatasetError(f"{name!r} is not a valid name of a data set: expected a-z, 0-9, '_', '.' and '-'")
    readonly.refuse(store)
    files = _files(paths)
    marks = {path: disk.mark_of(path) for path in files.values()}
    sums = dict(zip(files, transfers.each(disk.sha256_file, files.values()), strict=True))
    for _ in range(TRIES):
        before = versions(store, name)
        if before and before[-1].files == sums:
            return before[-1], False
        number = before[-1].number + 1 if before else 1
        folder = f"{number:06d}-{digest(sums)[:8]}"
        for target, path in files.items():
            _copy(store, path, store.join(FOLDER, name, folder, target))
        if changed := [str(path) for path, mark in marks.items() if disk.mark_of(path) != mark]:
            raise DatasetError(f"{changed[0]} changed while it was stored: try again when nothing writes it")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        version = Version(name, number, folder, sums, pins.who(), now)
        if create(store, store.join(FOLDER, name, f"{number:06d}.json"), VERSION.dump_json(version, indent=1)):
            return version, True
    raise DatasetError(f"{name} gets versions from elsewhere at this moment: try again")


def _files(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the files by their names in a version."""
    found: dict[str, Path] = {}
    for given in paths:
        if not given.exists():
            raise DatasetError(f"{given} is not there")
        below = sorted(path for path in given.rglob("*") if not path.is_dir()) if given.is_dir() else [given]
        if others := [path for path in below if not path.is_file()]:
            raise DatasetError(f"{others[0]} is no file: expected files and folders")
        if links := [path for path in given.rglob("*") if path.is_symlink() and path.is_dir()]:
            raise DatasetError(f"{links[0]} is a link to a folder: name the folder that it points to")
        for path in below:
            target = path.relative_to(given).as_posix() if given.is_dir() else path.name
            if target in found:
                raise DatasetError(f"{found[target]} and {path} have one name: put them into one folder, and name that")
            found[target] = path
    if not found:
        raise DatasetError(f"no files in {', '.join(map(str, paths))}")
    return found


def _copy(store: Store, path: Path, target: str) -> None:
    if not store.is_local:
        store.fs.put_file(str(path), target)
        return
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    with whole_file(Path(target)) as partial:
        shutil.copyfile(path, partial)
        disk.sync_file(partial)
    disk.sync_folders([Path(target).parent])


def names(store: Store) -> list[str]:
    """Return the names of all data sets, sorted."""
    return [name for name in store.names(FOLDER) if _NAME.fullmatch(name)]


def versions(store: Store, name: str) -> list[Version]:
    """Return the versions of a name, oldest first. Raises DatasetError for an unreadable one."""
    found = []
    for number in sorted(int(m[1]) for file in store.names(FOLDER, name) if (m := _FILE.fullmatch(file))):
        file = f"{number:06d}.json"
        try:
            found.append(VERSION.validate_json(store.read_bytes(FOLDER, name, file) or b"", strict=True))
        except ValueError as e:
            place = store.address(FOLDER, name, file)
            raise DatasetError(f"{place} is not a version of a data set ({e}): restore it from a backup") from e
    return found


def located(store: Store, source: str) -> str:
    """Return the URL of the files of `dataset:NAME` or `dataset:NAME@NUMBER`. Raises DatasetError."""
    name, at, number = source.removeprefix(PREFIX).partition("@")
    found = versions(store, name) if _NAME.fullmatch(name) else []
    if not found:
        near = closest(name, names(store))
        hint = f"did you mean {near}?" if near else f"`rlhf dataset {name or 'NAME'} FILE...` stores one"
        raise DatasetError(f"no data set {name!r} in {store.shown}; {hint}")
    chosen = next((v for v in found if str(v.number) == number), None) if at else found[-1]
    if chosen is None:
        raise DatasetError(f"data set {name} has no version {number!r}; it has 1 to {found[-1].number}")
    path = store.join(FOLDER, name, chosen.folder)
    return path if store.is_local else f"{store.url.rstrip('/')}/{FOLDER}/{name}/{chosen.folder}"

"""The work folder of a stage under way: local, and copied to a remote store so that another machine can go on.

A unit is what is kept as a whole: a step below `checkpoints/`, or any other folder (a shard, a chunk). It never
changes once it is complete. Its seal in `.sealed/`, written when all of it is on the disk, has the checksums of its
files: the next try takes a unit that fits its seal, and makes any other again. A marker in `.mirrored/` on the remote
store, written last, says that it has all of a unit, and is the seal that the unit must fit when it arrives elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

from stages.store import disk
from stages.store.artifacts import Store
from tuning import multihost
from tuning.atomic import is_partial, whole_file

# Folders that hold what is under way, not what is finished, and those whose files are checked one by one.
NOT_UNITS = ("replay", "pieces", "evaluation")
OUT = "out"
"""How folders with the output of a try are named, up to a dot."""
CHECKPOINTS = "checkpoints"
MIRRORED, SEALED = ".mirrored", ".sealed"


class WorkFolder:
    """The work of one stage at one key."""

    def __init__(self, store: Store, stage: str, key: str):
        index = multihost.process_index()
        self.path = store.scratch / "work" / stage / (f"{key}.{index}" if index else key)
        self._store = store
        self._remote = store.join("work", stage, key)

    def open(self, log: Callable[[str], None] = lambda _: None) -> Path:
        """The folder, which is made where there is none: on a remote store from the units that were mirrored there.

        Units without their seal, or that do not fit it, are removed: a loss of power, a disk or a transfer has damaged
        them. log: is told of those that have arrived so.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for unit in self._units():
            begun = self._files(unit) or (self.path / SEALED / self._name(unit)).exists()
            if begun and not self._is_whole(unit):
                shutil.rmtree(unit)
                for kind in (SEALED, MIRRORED):
                    (self.path / kind / self._name(unit)).unlink(missing_ok=True)
        if not self._store.is_local and multihost.is_primary():
            self._download(log)
        return self.path

    def finished(self, known: Collection[str] = ()) -> set[str]:
        """The names of finished folders, which another process may be adding to; none of checkpoints, and none of those
        that are known."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path / SEALED) as entries:
            new = [entry for entry in entries if entry.name not in known and entry.is_file()]
            return {entry.name for entry in new if not is_partial(Path(entry))}
        return set()

    def files_of(self, name: str) -> list[Path]:
        """The files of a finished unit; none of one that does not fit its seal, or is gone by now."""
        with contextlib.suppress(FileNotFoundError):
            if self._is_whole(self.path / name):
                return self._files(self.path / name)
        return []

    def _name(self, unit: Path) -> str:
        return unit.relative_to(self.path).as_posix()

    def _files(self, unit: Path) -> list[Path]:
        return sorted(path for path in unit.rglob("*") if path.is_file() and not is_partial(path))

    def _sums(self, unit: Path) -> dict[str, str]:
        return {path.relative_to(unit).as_posix(): disk.sha256_file(path) for path in self._files(unit)}

    def _is_whole(self, unit: Path) -> bool:
        """Whether a unit fits its seal."""
        try:
            seal = (self.path / SEALED / self._name(unit)).read_bytes()
        except OSError:
            return False
        return _read(seal) == self._sums(unit)

    def _seal(self, unit: Path, seal: bytes | None = None) -> None:
        """Has a unit on the disk, then its seal. seal: of one that has arrived; None: it is what is there."""
        folders = {self.path, unit.parent}
        for path in unit.rglob("*"):
            folders.add(path.parent)
            if path.is_file():
                disk.sync_file(path)
        disk.sync_folders(folders)
        self._write_seal(self._name(unit), json.dumps(self._sums(unit)).encode() if seal is None else seal)

    def _write_seal(self, name: str, seal: bytes) -> None:
        path = self.path / SEALED / name
        with whole_file(path) as partial, partial.open("wb") as f:
            f.write(seal)
            f.flush()
            os.fsync(f.fileno())
        disk.sync_folders([path.parent, self.path / SEALED, self.path])

    def _download(self, log: Callable[[str], None]) -> None:
        """Brings the units that another machine has finished since: the work may have been there and come back."""
        fs, markers = self._store.fs, f"{self._remote}/{MIRRORED}/"
        units = [marker.removeprefix(markers) for marker in fs.find(markers.rstrip("/"))]
        newest = max((int(step.name) for step in self._steps()), default=-1)
        missing = [u for u in units if not (self.path / u).exists() and _step(u, newest) >= newest]
        # Aside: half a download must not look like finished work.
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
        try:
            for unit in missing:
                # Another machine may remove a checkpoint that it has replaced meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    self._arrived(unit, aside, log)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _arrived(self, unit: str, aside: Path, log: Callable[[str], None]) -> None:
        """Brings one unit by way of `aside`. One that does not fit the seal that its marker is, is left out."""
        fs, marker = self._store.fs, f"{self._remote}/{MIRRORED}/{unit}"
        seal = fs.cat_file(marker)
        wanted = _read(seal) or {}
        # What an earlier try has left there besides is not of the unit.
        for path in fs.find(f"{self._remote}/{unit}"):
            if sha256 := wanted.get(path.removeprefix(f"{self._remote}/{unit}/")):
                local = aside / path.removeprefix(f"{self._remote}/")
                local.parent.mkdir(parents=True, exist_ok=True)
                disk.fetched(fs, path, local, sha256)
        if not wanted or self._sums(aside / unit) != wanted:
            # Removed by another machine, not damaged: the marker goes first.
            if fs.exists(marker):
                log(f"{unit} of unfinished work does not fit its checksums on {self._store.shown}, and is made again")
            return
        (self.path / unit).parent.mkdir(parents=True, exist_ok=True)
        (aside / unit).rename(self.path / unit)
        self._seal(self.path / unit, seal)
        self._mark(unit)

    def _mark(self, unit: str) -> None:
        mark = self.path / MIRRORED / unit
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_bytes(b"{}")

    def save(self) -> None:
        """Seals finished units, and copies them to a remote store; removes checkpoints that a newer one has replaced
        there."""
        for unit in self._units():
            if not (self.path / SEALED / self._name(unit)).exists():
                self._seal(unit)
        for seal in list((self.path / SEALED / CHECKPOINTS).glob("*")):
            if not (self.path / CHECKPOINTS / seal.name).exists():
                seal.unlink(missing_ok=True)
        if not self._store.is_local and multihost.is_primary():
            self._mirror()

    def _mirror(self) -> None:
        for unit in self._units():
            name = self._name(unit)
            if (self.path / MIRRORED / name).exists():
                continue
            for path in self._files(unit):
                self._store.fs.put_file(str(path), f"{self._remote}/{path.relative_to(self.path).as_posix()}")
            self._store.fs.pipe_file(f"{self._remote}/{MIRRORED}/{name}", (self.path / SEALED / name).read_bytes())
            self._mark(name)
        for mark in list((self.path / MIRRORED / CHECKPOINTS).glob("*")):
            name = mark.relative_to(self.path / MIRRORED).as_posix()
            if (self.path / name).exists():
                continue
            # The marker goes first: without it nothing takes the rest for a complete unit. Another machine, or a try
            # that was killed here, may have removed it.
            with contextlib.suppress(FileNotFoundError):
                self._store.remove(f"{self._remote}/{MIRRORED}/{name}")
            self._store.remove_folder(f"{self._remote}/{name}")
            mark.unlink()

    def _units(self) -> list[Path]:
        others = (MIRRORED, SEALED, CHECKPOINTS, *NOT_UNITS)
        found = (p for p in self.path.iterdir() if p.is_dir() and p.name not in others and not is_partial(p))
        folders = [p for p in found if p.name.partition(".")[0] != OUT]
        return sorted(folders + self._steps())

    def _steps(self) -> list[Path]:
        return [p for p in (self.path / CHECKPOINTS).glob("*") if p.name.isdigit()]

    def drop(self) -> None:
        """Removes the work here and on the store, once the artifact is committed."""
        shutil.rmtree(self.path, ignore_errors=True)
        # Downloads that a kill has cut short.
        for partial in self.path.parent.glob(f".{self.path.name}.*.part"):
            shutil.rmtree(partial, ignore_errors=True)
        if not self._store.is_local and multihost.is_primary() and self._store.fs.exists(self._remote):
            self._store.remove_folder(self._remote)


def _step(unit: str, other: int) -> int:
    """The step of a checkpoint; `other` for any other unit."""
    parent, _, name = unit.partition("/")
    return int(name) if parent == CHECKPOINTS else other


def _read(seal: bytes) -> dict[str, str] | None:
    """The checksums of a seal by path; None for what is none."""
    try:
        found = json.loads(seal)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None

"""The work folder of a running stage: local, and mirrored to a remote store so that another machine can resume it.

A unit is a step below `checkpoints/`, or any other folder (a shard, a chunk). Only complete units count, and they never
change. The seal of a unit in `.sealed/`, written when the whole unit is on the disk, contains the checksums of its
files. The next try uses units that fit their seals and removes others. A marker in `.mirrored/` on the remote store,
written last, is the seal of a unit that the remote store has.

Each process of a group has a folder. Process 0 has the work folder itself, and only it adds units, except for
checkpoints, to which each process adds its shards. A process has only those files of a checkpoint that it reads.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from rlhf.stages.store import disk, transfers
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.manifests import is_inside, sums_of
from rlhf.tuning import multihost
from rlhf.tuning.atomic import is_partial, whole_file

# Folders of unfinished work, and folders whose files are checked one by one.
NOT_UNITS = ("replay", "pieces", "evaluation")
OUT = "out"
"""The names of folders with the output of a try, up to a dot."""
CHECKPOINTS = "checkpoints"
MIRRORED, SEALED = ".mirrored", ".sealed"
OF_PROCESS = ".process-"
"""Separates key and number in the names of the folders of processes after the first."""
SHARE, SHORT_SECONDS = 0.1, 1.0
"""A growing journal is sent whole: a share of the stage's time at most goes to that, if it takes longer."""
CHUNK = re.compile(r"/\d+/c(/[\d/]+)?$")
"""Files of a checkpoint with values; the others describe them."""


def is_chunk(path: str) -> bool:
    """Whether a file of a checkpoint has values, of which a process reads only its shards."""
    return CHUNK.search(path) is not None


class WorkFolder:
    """The unfinished work of one stage at one key."""

    def __init__(self, store: Store, stage: str, key: str):
        index = multihost.process_index()
        self.path = store.scratch / "work" / stage / (f"{key}{OF_PROCESS}{index}" if index else key)
        self._key, self._store = key, store
        self._due: dict[Path, float] = {}
        """When a journal is mirrored next."""
        self._shared = store.join("work", stage, key)
        """The folder that all processes see; in a local store it is that of process 0."""
        self._is_copy = index > 0 or not store.is_local
        self._markers = f"{self._shared}/{SEALED if store.is_local else MIRRORED}"

    def open(self) -> Path:
        """Create the folder if there is none, download the units of a remote store, and return the folder.

        It removes units that have no seal or do not fit it: a loss of power, a disk or a transfer has damaged them.
        Every process of a group calls this.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for unit in self._units():
            begun = self._is_step(unit) or self._files(unit) or self._seal_of(unit).exists()
            if begun and not self._is_whole(unit):
                self._remove(unit)
        if self._is_copy or multihost.process_count() > 1:
            shared: list[str] = multihost.from_primary(self._in_shared)
            if self._is_copy:
                self._download(shared)
        return self.path

    def fetch(self, paths: Iterable[Path]) -> None:
        """Download files of complete checkpoints to their paths here; raise ArtifactError for a damaged file."""
        missing = [path for path in paths if self._is_copy and not path.exists()]

        @functools.cache
        def sums(unit: Path) -> dict[str, str]:
            return sums_of(self._seal_of(unit).read_bytes()) or {}

        def one(path: Path) -> None:
            unit = self.path.joinpath(*path.relative_to(self.path).parts[:2])
            sha256 = sums(unit).get(path.relative_to(unit).as_posix())
            # Zarr writes no file for a chunk of zeros.
            if sha256 is None:
                return
            with whole_file(path) as partial:
                if not disk.fetched(self._store.fs, self._there(path), partial, sha256):
                    with contextlib.suppress(OSError):
                        self._store.remove(f"{self._markers}/{self._name(unit)}")
                    there = self._store.address("work", *Path(self._shared).parts[-2:], self._name(path))
                    raise ArtifactError(f"the checkpoint {there} is damaged and removed: run the same command again")

        transfers.each(one, missing)

    def _name(self, unit: Path) -> str:
        return unit.relative_to(self.path).as_posix()

    def _there(self, path: Path) -> str:
        return f"{self._shared}/{self._name(path)}"

    def _seal_of(self, unit: Path) -> Path:
        return self.path / SEALED / self._name(unit)

    def _mark_of(self, unit: Path) -> Path:
        """The local file that exists if the shared folder has the unit."""
        return self.path / MIRRORED / self._name(unit)

    def _files(self, unit: Path) -> list[Path]:
        return sorted(path for path in unit.rglob("*") if path.is_file() and not is_partial(path))

    def _sums(self, unit: Path) -> dict[str, str]:
        return transfers.checksums(unit, self._files(unit))

    def _is_whole(self, unit: Path) -> bool:
        """Whether a unit fits its seal. A checkpoint in the shared folder may lack chunks here."""
        try:
            wanted = sums_of(self._seal_of(unit).read_bytes())
        except FileNotFoundError:
            return False
        found = self._sums(unit)
        if wanted is not None and self._is_step(unit) and self._is_copy and self._mark_of(unit).exists():
            return found.items() <= wanted.items() and all(
                is_chunk(f"/{name}") for name in wanted.keys() - found.keys()
            )
        return found == wanted

    def _remove(self, unit: Path) -> None:
        shutil.rmtree(unit, ignore_errors=True)
        for path in (self._seal_of(unit), self._mark_of(unit)):
            path.unlink(missing_ok=True)

    def _seal(self, unit: Path, seal: bytes | None = None) -> None:
        """Sync a unit to the disk, then write its seal. seal: of a downloaded or joined unit; None: of its files."""
        folders = {self.path, unit.parent}
        for path in unit.rglob("*"):
            folders.add(path.parent)
            if path.is_file():
                disk.sync_file(path)
        disk.sync_folders(folders)
        disk.write_synced(self._seal_of(unit), json.dumps(self._sums(unit)).encode() if seal is None else seal)
        disk.sync_folders([self.path / SEALED, self.path])

    def _in_shared(self) -> list[str]:
        """Return the names of the units in the shared folder, by their markers."""
        names = (marker.removeprefix(f"{self._markers}/") for marker in self._store.fs.find(self._markers))
        return [name for name in names if is_inside(name)]

    def _shared_seal(self, unit: Path) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return self._store.cat(f"{self._markers}/{self._name(unit)}")
        return None

    def _download(self, shared: list[str]) -> None:
        """Download the units that another machine has finished since."""
        if multihost.process_count() > 1:
            # A checkpoint must be complete in all processes, and one of another try has other bits.
            for unit in self._units():
                if self._name(unit) not in shared or self._seal_of(unit).read_bytes() != self._shared_seal(unit):
                    self._remove(unit)
        if multihost.is_primary():
            self._fetch_journals()
        newest = max((int(step.name) for step in self._steps()), default=-1)
        # Another folder first, so that half a download does not look like finished work.
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
        try:
            for name in shared:
                if not (self.path / name).exists() and _step(name, newest) >= newest:
                    # Another machine may remove a checkpoint that it has replaced meanwhile.
                    with contextlib.suppress(FileNotFoundError):
                        self._arrived(self.path / name, aside / name)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _fetch_journals(self) -> None:
        """Download journals of which another machine has written more."""
        for place, info in self._store.fs.find(self._shared, maxdepth=1, detail=True).items():
            path = self.path / place.rpartition("/")[2]
            if not path.exists() or path.stat().st_size < info["size"]:
                with contextlib.suppress(FileNotFoundError), whole_file(path) as partial:
                    self._store.fs.get_file(place, str(partial))

    def _arrived(self, unit: Path, aside: Path) -> None:
        """Download one unit by way of `aside`, a checkpoint without its chunks; skip it if it does not fit its seal."""
        marker = f"{self._markers}/{self._name(unit)}"
        seal = self._store.cat(marker)
        known = sums_of(seal) or {}
        wanted = {name: sha256 for name, sha256 in known.items() if not (self._is_step(unit) and is_chunk(f"/{name}"))}

        def one(name: str) -> bool:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            return disk.fetched(self._store.fs, self._there(unit / name), aside / name, wanted[name])

        there = {path.removeprefix(f"{self._there(unit)}/") for path in self._store.fs.find(self._there(unit))}
        if not known or known.keys() - there or not all(transfers.each(one, wanted)):
            return
        unit.parent.mkdir(parents=True, exist_ok=True)
        aside.rename(unit)
        self._seal(unit, seal)
        self._mark(unit)

    def _mark(self, unit: Path) -> None:
        mark = self._mark_of(unit)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_bytes(b"{}")

    def save(self) -> None:
        """Seal finished units, mirror them to a remote store, and remove replaced checkpoints there.

        Process 0 of a group calls this for any unit, and every process for a checkpoint, which is complete when each
        has added its files.
        """
        for unit in self._units():
            if self._seal_of(unit).exists():
                continue
            if self._is_step(unit) and multihost.process_count() > 1:
                self._join(unit)
            elif multihost.is_primary():
                self._seal(unit)
        if not self._store.is_local and multihost.is_primary():
            self._mirror()
        for kind in (SEALED, MIRRORED):
            for path in list((self.path / kind / CHECKPOINTS).glob("*")):
                if not (self.path / CHECKPOINTS / path.name).exists():
                    path.unlink(missing_ok=True)

    def _join(self, unit: Path) -> None:
        """Add the files of this process to a checkpoint; process 0 seals it after all processes."""
        # Checkpoints are saved in the background; their own channel keeps other exchanges apart.
        channel = f"work/{self._key}/{self._name(unit)}"
        seal = json.dumps(transfers.joined(unit, self._sums(unit), channel)).encode()
        if self._is_copy:
            transfers.send(self._store.fs, unit, self._there(unit))
        multihost.barrier(channel)
        if multihost.is_primary() and not self._store.is_local:
            self._store.fs.pipe_file(f"{self._markers}/{self._name(unit)}", seal)
        if self._is_copy:
            self._mark(unit)
        self._seal(unit, seal)

    def _mirror(self) -> None:
        for path in self.path.glob("*.jsonl"):
            began = time.monotonic()
            if began >= self._due.get(path, 0.0):
                self._store.fs.put_file(str(path), self._there(path))
                took = time.monotonic() - began
                self._due[path] = began + (took / SHARE if took > SHORT_SECONDS else 0.0)
        for unit in self._units():
            if self._mark_of(unit).exists():
                continue
            transfers.send(self._store.fs, unit, self._there(unit))
            self._store.fs.pipe_file(f"{self._markers}/{self._name(unit)}", self._seal_of(unit).read_bytes())
            self._mark(unit)
        for mark in list((self.path / MIRRORED / CHECKPOINTS).glob("*")):
            unit = self.path / CHECKPOINTS / mark.name
            if unit.exists():
                continue
            # The marker first: without it the rest is not a unit. Another machine, or a killed try here, may have
            # removed it.
            with contextlib.suppress(FileNotFoundError):
                self._store.remove(f"{self._markers}/{self._name(unit)}")
            self._store.remove_folder(self._there(unit))
            mark.unlink()

    def _units(self) -> list[Path]:
        others = (MIRRORED, SEALED, CHECKPOINTS, *NOT_UNITS)
        found = (p for p in self.path.iterdir() if p.is_dir() and p.name not in others and not is_partial(p))
        folders = [p for p in found if p.name.partition(".")[0] != OUT]
        return sorted(folders + self._steps())

    def _steps(self) -> list[Path]:
        return [p for p in (self.path / CHECKPOINTS).glob("*") if p.name.isdigit()]

    def _is_step(self, unit: Path) -> bool:
        return unit.parent.name == CHECKPOINTS

    def drop(self) -> None:
        """Remove the work here and in the store, after the commit of the artifact."""
        shutil.rmtree(self.path, ignore_errors=True)
        # Folders of other processes, and downloads that a kill interrupted.
        left = [f".{self.path.name}.*.part", *([f"{self._key}{OF_PROCESS}*"] if multihost.is_primary() else [])]
        for path in itertools.chain.from_iterable(map(self.path.parent.glob, left)):
            shutil.rmtree(path, ignore_errors=True)
        if not self._store.is_local and multihost.is_primary():
            self._store.remove_folder(self._shared)


def _step(unit: str, other: int) -> int:
    """Return the step of a checkpoint; `other` for any other unit."""
    parent, _, name = unit.partition("/")
    return int(name) if parent == CHECKPOINTS else other

"""The work folder of a stage under way: local, and copied to a remote store so that another machine can resume it.

A unit is complete or it does not count: a step below `checkpoints/`, or any other folder (a shard, a chunk). It never
changes once it is complete. Its seal in `.sealed/`, written when all of it is on the disk, has the checksums of its
files: the next try takes a unit that fits its seal, and removes any other. A marker in `.mirrored/` on the remote
store, written last, is the seal of a unit that the remote store has.

The processes of a group have a folder each. Process 0 has the work folder itself; it alone adds units, except for
checkpoints, to which each process adds its shards. Of a checkpoint a process has the files that it reads.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from rlhf.stages.store import disk, transfers
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.manifests import is_inside, sums_of
from rlhf.tuning import multihost
from rlhf.tuning.atomic import is_partial, whole_file

# Folders that hold what is under way, not what is finished, and those whose files are checked one by one.
NOT_UNITS = ("replay", "pieces", "evaluation")
OUT = "out"
"""How folders with the output of a try are named, up to a dot."""
CHECKPOINTS = "checkpoints"
MIRRORED, SEALED = ".mirrored", ".sealed"
OF_PROCESS = ".process-"
"""Between the key and the number of the process in the name of the folder of a process that is not the first."""
CHUNK = re.compile(r"/\d+/c(/[\d/]+)?$")
"""Files of a checkpoint that hold values; the others describe them."""


def is_chunk(path: str) -> bool:
    """Whether a file of a checkpoint holds values: a process reads those of its shards alone."""
    return CHUNK.search(path) is not None


class WorkFolder:
    """The work of one stage at one key."""

    def __init__(self, store: Store, stage: str, key: str):
        index = multihost.process_index()
        self.path = store.scratch / "work" / stage / (f"{key}{OF_PROCESS}{index}" if index else key)
        self._key, self._store = key, store
        self._shared = store.join("work", stage, key)
        """The folder that all processes see; of a local store it is that of process 0."""
        self._is_copy = index > 0 or not store.is_local
        self._markers = f"{self._shared}/{SEALED if store.is_local else MIRRORED}"

    def open(self, log: Callable[[str], None] = lambda _: None) -> Path:
        """The folder, which is made if there is none: on a remote store from the units that were mirrored there.

        Units without their seal, or that do not fit it, are removed: a loss of power, a disk or a transfer has damaged
        them. log: called with a line on those that have arrived so. Every process of a group calls this.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for unit in self._units():
            begun = self._is_step(unit) or self._files(unit) or self._seal_of(unit).exists()
            if begun and not self._is_whole(unit):
                self._remove(unit)
        if self._is_copy or multihost.process_count() > 1:
            shared: list[str] = multihost.from_primary(self._in_shared)
            if self._is_copy:
                self._download(shared, log)
        return self.path

    def fetch(self, paths: Iterable[Path]) -> None:
        """Brings files of complete checkpoints to their paths here. Raises ArtifactError for a damaged file."""
        missing = [path for path in paths if self._is_copy and not path.exists()]
        seals: dict[Path, dict[str, str]] = {}

        def one(path: Path) -> None:
            unit = self.path.joinpath(*path.relative_to(self.path).parts[:2])
            sha256 = seals[unit].get(path.relative_to(unit).as_posix())
            # Zarr writes no file for a chunk of zeros.
            if sha256 is None:
                return
            with whole_file(path) as partial:
                if not disk.fetched(self._store.fs, self._there(path), partial, sha256):
                    with contextlib.suppress(OSError):
                        self._store.remove(f"{self._markers}/{self._name(unit)}")
                    there = self._store.address("work", *Path(self._shared).parts[-2:], self._name(path))
                    raise ArtifactError(
                        f"{there} differs from its checksum: the checkpoint is not used any more; "
                        "run the same command again"
                    )

        for unit in {self.path.joinpath(*path.relative_to(self.path).parts[:2]) for path in missing}:
            seals[unit] = sums_of(self._seal_of(unit).read_bytes()) or {}
        transfers.each(one, missing)

    def _name(self, unit: Path) -> str:
        return unit.relative_to(self.path).as_posix()

    def _there(self, path: Path) -> str:
        return f"{self._shared}/{self._name(path)}"

    def _seal_of(self, unit: Path) -> Path:
        return self.path / SEALED / self._name(unit)

    def _mark_of(self, unit: Path) -> Path:
        """The file that says that the shared folder has the unit."""
        return self.path / MIRRORED / self._name(unit)

    def _files(self, unit: Path) -> list[Path]:
        return sorted(path for path in unit.rglob("*") if path.is_file() and not is_partial(path))

    def _sums(self, unit: Path) -> dict[str, str]:
        return transfers.checksums(unit, self._files(unit))

    def _is_whole(self, unit: Path) -> bool:
        """Whether a unit fits its seal. Of a checkpoint that the shared folder has, chunks may be missing here."""
        try:
            wanted = sums_of(self._seal_of(unit).read_bytes())
        except OSError:
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
        """Has a unit on the disk, then its seal. seal: of one that has arrived or was joined; None: of what is here."""
        folders = {self.path, unit.parent}
        for path in unit.rglob("*"):
            folders.add(path.parent)
            if path.is_file():
                disk.sync_file(path)
        disk.sync_folders(folders)
        self._write_seal(self._seal_of(unit), json.dumps(self._sums(unit)).encode() if seal is None else seal)

    def _write_seal(self, path: Path, seal: bytes) -> None:
        with whole_file(path) as partial, partial.open("wb") as f:
            f.write(seal)
            f.flush()
            os.fsync(f.fileno())
        disk.sync_folders([path.parent, self.path / SEALED, self.path])

    def _in_shared(self) -> list[str]:
        """The units that the shared folder has, by their markers."""
        names = (marker.removeprefix(f"{self._markers}/") for marker in self._store.fs.find(self._markers))
        return [name for name in names if is_inside(name)]

    def _shared_seal(self, unit: Path) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return bytes(self._store.fs.cat_file(f"{self._markers}/{self._name(unit)}"))
        return None

    def _download(self, shared: list[str], log: Callable[[str], None]) -> None:
        """Brings the units that another machine has finished since: the work may have been there and come back."""
        if multihost.process_count() > 1:
            # A checkpoint that not all processes have is none, and one of another try has other bits.
            for unit in self._units():
                if self._name(unit) not in shared or self._seal_of(unit).read_bytes() != self._shared_seal(unit):
                    self._remove(unit)
        if multihost.is_primary():
            self._fetch_journals()
        newest = max((int(step.name) for step in self._steps()), default=-1)
        # Aside: half a download must not look like finished work.
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
        try:
            for name in shared:
                if not (self.path / name).exists() and _step(name, newest) >= newest:
                    # Another machine may remove a checkpoint that it has replaced meanwhile.
                    with contextlib.suppress(FileNotFoundError):
                        self._arrived(self.path / name, aside / name, log)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _fetch_journals(self) -> None:
        """Bring journals of which another machine has written more."""
        for place, info in self._store.fs.find(self._shared, maxdepth=1, detail=True).items():
            path = self.path / place.rpartition("/")[2]
            if not path.exists() or path.stat().st_size < info["size"]:
                with contextlib.suppress(FileNotFoundError), whole_file(path) as partial:
                    self._store.fs.get_file(place, str(partial))

    def _arrived(self, unit: Path, aside: Path, log: Callable[[str], None]) -> None:
        """Brings one unit by way of `aside`; of a checkpoint without the chunks. Leaves out one that does not fit the
        seal in its marker."""
        marker = f"{self._markers}/{self._name(unit)}"
        seal = self._store.fs.cat_file(marker)
        known = sums_of(seal) or {}
        wanted = {name: sha256 for name, sha256 in known.items() if not (self._is_step(unit) and is_chunk(f"/{name}"))}

        def one(name: str) -> bool:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            return disk.fetched(self._store.fs, self._there(unit / name), aside / name, wanted[name])

        there = {path.removeprefix(f"{self._there(unit)}/") for path in self._store.fs.find(self._there(unit))}
        if not known or known.keys() - there or not all(transfers.each(one, wanted)):
            # Removed by another machine, not damaged: the marker goes first.
            if self._store.fs.exists(marker):
                log(
                    f"{self._name(unit)} of unfinished work does not fit its checksums on {self._store.shown}, "
                    "and is made again"
                )
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
        """Seals finished units, and copies them to a remote store; removes checkpoints that a newer one has replaced
        there.

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
        """Adds the files of this process to a checkpoint; process 0 seals it when all have done so."""
        # Checkpoints are saved in the background: by its name, no other exchange comes between.
        channel = f"work/{self._key}/{self._name(unit)}"
        seal = json.dumps(transfers.joined(unit, self._sums(unit), channel)).encode()
        if self._is_copy:
            transfers.send(self._store, unit, self._there(unit))
        multihost.barrier(channel)
        if multihost.is_primary() and not self._store.is_local:
            self._store.fs.pipe_file(f"{self._markers}/{self._name(unit)}", seal)
        if self._is_copy:
            self._mark(unit)
        self._seal(unit, seal)

    def _mirror(self) -> None:
        for path in self.path.glob("*.jsonl"):
            self._store.fs.put_file(str(path), self._there(path))
        for unit in self._units():
            if self._mark_of(unit).exists():
                continue
            transfers.send(self._store, unit, self._there(unit))
            self._store.fs.pipe_file(f"{self._markers}/{self._name(unit)}", self._seal_of(unit).read_bytes())
            self._mark(unit)
        for mark in list((self.path / MIRRORED / CHECKPOINTS).glob("*")):
            unit = self.path / CHECKPOINTS / mark.name
            if unit.exists():
                continue
            # The marker goes first: without it nothing takes the rest for a complete unit. Another machine, or a try
            # that was killed here, may have removed it.
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
        """Removes the work here and on the store, once the artifact is committed."""
        shutil.rmtree(self.path, ignore_errors=True)
        # Folders of other processes, and downloads that a kill has cut short.
        left = [f".{self.path.name}.*.part", *([f"{self._key}{OF_PROCESS}*"] if multihost.is_primary() else [])]
        for path in itertools.chain.from_iterable(map(self.path.parent.glob, left)):
            shutil.rmtree(path, ignore_errors=True)
        if not self._store.is_local and multihost.is_primary():
            self._store.remove_folder(self._shared)


def _step(unit: str, other: int) -> int:
    """The step of a checkpoint; `other` for any other unit."""
    parent, _, name = unit.partition("/")
    return int(name) if parent == CHECKPOINTS else other

"""The work folder of a stage under way: local, and copied to a remote store so that another machine can go on.

A unit is what is copied as a whole: a step below `checkpoints/`, or any other folder (a shard, a chunk). It never
changes once it is complete. A marker in `.mirrored/`, written last, says that the remote store has all of a unit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path

from stages.store.artifacts import Store
from tuning.atomic import is_partial

# Folders that hold what is under way, not what is finished.
NOT_UNITS = ("out", "replay")
CHECKPOINTS = "checkpoints"
MIRRORED = ".mirrored"


class WorkFolder:
    """The work of one stage at one key."""

    def __init__(self, store: Store, stage: str, key: str):
        self.path = store.scratch / "work" / stage / key
        self._store = store
        self._remote = store.join("work", stage, key)

    def open(self) -> Path:
        """The folder, which is made where there is none: on a remote store from the units that were mirrored there."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._store.is_local:
            self._download()
        return self.path

    def _download(self) -> None:
        """Brings the units that another machine has finished since: the work may have been there and come back."""
        fs, markers = self._store.fs, f"{self._remote}/{MIRRORED}/"
        units = [marker.removeprefix(markers) for marker in fs.find(markers.rstrip("/"))]
        newest = max((int(step.name) for step in self._steps()), default=-1)
        missing = [u for u in units if not (self.path / u).exists() and _step(u, newest) >= newest]
        # Aside: half a download must not look like finished work.
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
        try:
            for unit in missing:
                for path in fs.find(f"{self._remote}/{unit}"):
                    local = aside / path.removeprefix(f"{self._remote}/")
                    local.parent.mkdir(parents=True, exist_ok=True)
                    fs.get_file(path, str(local))
                # Another machine may remove a checkpoint that it has replaced meanwhile.
                if (aside / unit).exists():
                    (self.path / unit).parent.mkdir(parents=True, exist_ok=True)
                    (aside / unit).rename(self.path / unit)
                    self._mark(unit)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _mark(self, unit: str) -> None:
        mark = self.path / MIRRORED / unit
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_bytes(b"{}")

    def mirror(self) -> None:
        """Copies finished units to a remote store, and removes checkpoints that a newer one has replaced there."""
        if self._store.is_local:
            return
        for unit in self._units():
            name = unit.relative_to(self.path).as_posix()
            if (self.path / MIRRORED / name).exists():
                continue
            for path in sorted(p for p in unit.rglob("*") if p.is_file() and not is_partial(p)):
                self._store.fs.put_file(str(path), f"{self._remote}/{path.relative_to(self.path).as_posix()}")
            self._store.fs.pipe_file(f"{self._remote}/{MIRRORED}/{name}", b"{}")
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
        folders = [p for p in self.path.iterdir() if p.is_dir() and p.name not in (MIRRORED, CHECKPOINTS, *NOT_UNITS)]
        return sorted(folders + self._steps())

    def _steps(self) -> list[Path]:
        return [p for p in (self.path / CHECKPOINTS).glob("*") if p.name.isdigit()]

    def drop(self) -> None:
        """Removes the work here and on the store, once the artifact is committed."""
        shutil.rmtree(self.path, ignore_errors=True)
        # Downloads that a kill has cut short.
        for partial in self.path.parent.glob(f".{self.path.name}.*.part"):
            shutil.rmtree(partial, ignore_errors=True)
        if not self._store.is_local and self._store.fs.exists(self._remote):
            self._store.remove_folder(self._remote)


def _step(unit: str, other: int) -> int:
    """The step of a checkpoint; `other` for any other unit."""
    parent, _, name = unit.partition("/")
    return int(name) if parent == CHECKPOINTS else other

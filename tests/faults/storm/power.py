"""Loss of power: what a disk was not told to keep is lost, as the log of `shim.c` tells it."""

import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.faults.storm import ground as grounds
from tests.faults.storm.ground import Broken
from tests.faults.storm.moments import ROUNDS, choose
from tests.faults.storm.scene import Scene


def shim(folder: Path) -> Path:
    """The library that is loaded before libc, compiled once."""
    source, target = Path(__file__).with_name("shim.c"), folder / "shim.so"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        partial = folder / "shim.part.so"
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", partial, source, "-ldl"], check=True)
        partial.replace(target)
    return target


class Loss:
    """A disk at the moment when the power goes, from the log of what was done to it."""

    def __init__(self, root: Path, log: Path, graves: Path, rng: random.Random):
        """rng: decides how much of what was not synced is lost: all of it, or, by folder, what came last."""
        self.root, self.graves, self.rng = root, graves, rng
        self.dirty: set[int] = set()
        self.open: list[tuple[str, list[str]]] = []
        """Changes of names that no sync of their folder has followed, in their order."""
        for line in log.read_text(errors="surrogateescape").splitlines():
            kind, *fields = line.split("\t")
            if kind == "W":
                self.dirty.add(int(fields[0]))
            elif kind == "S":
                self.dirty.discard(int(fields[0]))
                self.open = [change for change in self.open if self._folder(change) != fields[0]]
            else:
                self.open.append((kind, fields))
        self.lost = self.truncated = 0

    @staticmethod
    def _folder(change: tuple[str, list[str]]) -> str:
        kind, fields = change
        return fields[2] if kind == "R" else fields[0]

    def strike(self) -> None:
        """Undoes the changes of names, the last one first, and empties files whose data were not synced."""
        worst = self.rng.random() < 0.5
        kept = {folder: 1.0 if worst else self.rng.random() for folder in {self._folder(c) for c in self.open}}
        for place, change in reversed(list(enumerate(self.open))):
            # Of each folder the changes from some moment on are lost.
            if worst or place >= len(self.open) * kept[self._folder(change)]:
                self._undo(*change)
        for path in self.root.rglob("*"):
            if path.is_file() and path.stat().st_ino in self.dirty and (worst or self.rng.random() < 0.5):
                with path.open("r+b") as file:
                    file.truncate(0)
                self.truncated += 1

    def _undo(self, kind: str, fields: list[str]) -> None:
        place = self._place(fields[0], fields[1])
        if kind == "R":
            target = self._place(fields[2], fields[3])
            if place is not None and target is not None and target.exists():
                self.lost += 1
                target.rename(place)
                self._rise(fields[4], target)
        elif place is None:
            return
        elif kind == "U":
            self._rise(fields[2], place)
        elif kind == "D":
            place.mkdir(exist_ok=True)
        elif place.exists():
            self.lost += 1
            shutil.rmtree(place) if place.is_dir() else place.unlink()

    def _rise(self, grave: str, place: Path) -> None:
        """What was removed or replaced is back."""
        if grave != "-" and (self.graves / grave).exists() and not place.exists():
            self.lost += 1
            (self.graves / grave).rename(place)

    def _place(self, inode: str, name: str) -> Path | None:
        for folder in (self.root, *self.root.rglob("*/")):
            if folder.is_dir() and str(folder.stat().st_ino) == inode:
                return folder / name
        return None


def _begun(log: Path, reached: Callable[[], bool]) -> Callable[[], bool]:
    """A moment of a try that has begun to write: what the try before has left may be such a moment already."""
    return lambda: log.exists() and reached()


def power(scene: Scene) -> None:
    """The power goes twice, at random moments of a stage."""
    scene.may_redo = True
    gone = scene.rng.choice((("sft",), ("reward",), ROUNDS, ("evaluate", "export"), ("prepare",), ("score",)))
    scene.partly(*gone)
    graves = scene.folder / "graves"
    for number in range(2):
        stage = scene.rng.choice(gone)
        shutil.rmtree(graves, ignore_errors=True)
        graves.mkdir()
        before = dict(scene.before)
        log = scene.folder / f"disk-{number}.log"
        run = scene.start(
            LD_PRELOAD=str(shim(scene.ground.folder)),
            STORM_ROOT=str(scene.store),
            STORM_LOG=str(log),
            STORM_GRAVES=str(graves),
        )
        label, reached = choose(scene.store, stage, scene.rng)
        if not run.until(_begun(log, reached)):
            scene.over(run)
            if not log.exists():
                raise Broken("the disk's log was not written")
            continue
        scene.pause(scene.rng.choice((0.0, 0.2, 1.0)))
        scene.struck("loss of power", stage, label)
        scene.cut(run)
        loss = Loss(scene.store, log, graves, scene.rng)
        loss.strike()
        (scene.folder / f"loss-{number}.txt").write_text(f"{loss.lost} names, {loss.truncated} files\n")
        # What this try has committed may be lost, if only just; what was there before it may not.
        now = grounds.committed(scene.url)
        if lost := [place for place, when in before.items() if now.get(place) != when]:
            raise Broken(f"artifacts of an earlier run are lost: {lost}")
        scene.before = now
    scene.finish()

"""A scene: one store, some tries with faults, and the command that nobody disturbs, after which all must be as calm."""

import contextlib
import dataclasses
import io
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from typer.testing import CliRunner

from rlhf.stages.store.artifacts import Store
from rlhf.tuning.atomic import is_partial
from tests.faults.storm import ground as grounds
from tests.faults.storm.ground import PATIENCE, Broken, Command, Ground

RUN = "run"
MOST_TRIES = 4
"""Undisturbed commands after the faults: damage that is found late costs a try for each artifact that has it."""
BY_ITSELF, AGAIN = "by itself", "same command"
_cli = threading.Lock()


@dataclasses.dataclass
class Fault:
    """One fault that has struck."""

    kind: str
    stage: str
    moment: str
    end: str = AGAIN
    """How the run went on: by itself, or by the same command again."""
    network: bool = False


class Scene:
    """One scene of the storm."""

    def __init__(self, ground: Ground, name: str, seed: int):
        self.ground, self.name = ground, f"{ground.recipe}-{seed}-{name}"
        self.rng = random.Random(f"{seed} {name}")
        self.folder = ground.folder / self.name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.store = self.folder / "store"
        self.url = str(self.store)
        self.faults: list[Fault] = []
        self.tries = 0
        self.damaged: set[tuple[str, str]] = set()
        """Artifacts that faults have damaged or removed: they alone may be made again."""
        self.may_redo = False
        """Whether faults have damaged unfinished work, which may then be done again."""
        self.before: dict[tuple[str, str], str] = {}
        self._current: list[Fault] = []
        self.environment: dict[str, str] = {}

    # -- tries -----------------------------------------------------------------------------

    def partly(self, *gone: str) -> None:
        """The store of the scene: the calm run's, without these stages' artifacts."""
        self.ground.partly(self.store, set(gone))
        self.before = grounds.committed(self.url)

    def start(self, name: str = RUN, **options: Any) -> Command:
        """The command, once more."""
        self.tries += 1
        log = self.folder / f"try-{self.tries}-{name}.log"
        options = {"store": self.url} | self.environment | options
        return Command(self.ground, self.name, name=name, log=log, **options)

    def struck(self, kind: str, stage: str, moment: str, network: bool = False) -> Fault:
        """Notes a fault."""
        fault = Fault(kind, stage, moment, network=network)
        self.faults.append(fault)
        self._current.append(fault)
        return fault

    def over(self, run: Command, seconds: float = PATIENCE) -> int:
        """Waits for a try that was struck, and notes whether it went on by itself."""
        code = run.wait(seconds)
        self._note(run, code)
        return code

    def _note(self, run: Command, code: int) -> None:
        for fault in self._current:
            fault.end = BY_ITSELF if code == 0 else AGAIN
        self._current = []
        self.once()
        if re.search(r"Traceback \(most recent call last\)", run.output()):
            raise Broken(f"the console shows a traceback:\n{run.output()[-4000:]}")

    def cut(self, run: Command) -> None:
        """Ends a command and all that it has started, at once, as a loss of power or a reboot does."""
        processes = grounds.of_scene(self.name)
        for process in processes:
            # Stopped first: none of them sees another's end.
            with contextlib.suppress(psutil.Error):
                process.suspend()
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        run.process.wait()
        psutil.wait_procs(processes, timeout=10)
        self._note(run, -signal.SIGKILL)

    # -- the end ---------------------------------------------------------------------------

    def finish(self, name: str = RUN, **options: Any) -> None:
        """The command undisturbed, until it has finished; then everything must be as in the calm run."""
        for attempt in range(MOST_TRIES):
            if grounds.record(self.url, name).get("status") == "finished":
                break
            kept = self.unfinished()
            run = self.start(name, **options)
            code = run.wait()
            self._note(run, code)
            if code == 0:
                self.resumed(kept, run.output())
                break
            if not (self.damaged or self.may_redo) or attempt + 1 == MOST_TRIES:
                raise Broken(f"the undisturbed command ended with {code}:\n{run.output()[-4000:]}")
        self.check(name)

    def check(self, name: str = RUN) -> None:
        """Raises Broken unless the run has the calm run's bits, and nothing is left over."""
        grounds.none_left(self.name)
        wanted, found = self.ground.digests(), grounds.digests(self.url, name)
        if found != wanted:
            other = sorted(n for n in wanted if found.get(n) != wanted[n])
            raise Broken(f"other bits than in the calm run: {other}")
        self.once()
        store = Store(self.url)
        for folder in ("leases", "work"):
            left = store.fs.find(store.join(folder)) if store.fs.exists(store.join(folder)) else []
            if self.faults:
                # Half a lease of a process that was killed: `rlhf gc` takes it.
                left = [path for path in left if not is_partial(Path(path))]
            if left:
                raise Broken(f"{folder}/ holds {left[:5]}")
        partial = [p for p in store.fs.find(store.root) if p.endswith(".part") and "/artifacts/" not in p]
        if partial and store.is_local and not self.faults:
            raise Broken(f"half-written files: {partial[:5]}")
        self.says(["verify", "--store", self.url])
        self.says(["audit", name, "--store", self.url])

    def says(self, words: list[str]) -> None:
        """Raises Broken unless `rlhf WORDS` ends with status 0."""
        from rlhf.flows.cli.app import app

        with _cli, contextlib.redirect_stderr(io.StringIO()):
            scratch = os.environ.get("RLHF_SCRATCH")
            os.environ["RLHF_SCRATCH"] = str(self.folder / "scratch-of-checks")
            try:
                result = CliRunner().invoke(app, words)
            finally:
                os.environ.pop("RLHF_SCRATCH") if scratch is None else os.environ.update(RLHF_SCRATCH=scratch)
        if result.exit_code != 0:
            raise Broken(f"rlhf {' '.join(words)} ended with {result.exit_code}:\n{result.output[-3000:]}")

    def once(self) -> None:
        """Raises Broken where an artifact that no fault has damaged was made twice."""
        now = grounds.committed(self.url)
        again = [p for p, when in self.before.items() if p not in self.damaged and now.get(p) != when]
        if again:
            raise Broken(f"made again although nothing had damaged it: {again}")
        self.before = {p: when for p, when in now.items()}

    def unfinished(self) -> dict[str, int]:
        """Finished pieces of unfinished work: shards by table and key, and the newest checkpoint."""
        found: dict[str, int] = {}
        for place in (self.store / "work").glob("*/*"):
            key = f"{place.parent.name}/{place.name}"
            if (self.store / "artifacts" / key / "manifest.json").exists():
                # Committed, and killed while the work was removed.
                continue
            for table in ("rollouts", "scores"):
                if count := len(list((place / ".sealed").glob(f"{table}-*"))):
                    found[f"{key}/{table}"] = count
            steps = [int(p.name) for p in (place / ".sealed" / "checkpoints").glob("*") if p.name.isdigit()]
            if steps:
                found[f"{key}/checkpoint"] = max(steps)
        return found

    def resumed(self, kept: dict[str, int], output: str) -> None:
        """Raises Broken where finished pieces were there and the command did not go on from them."""
        if self.may_redo or self.damaged:
            return
        for place, count in kept.items():
            _, _, what = place.rpartition("/")
            if what == "checkpoint" and not re.search(rf"resumed at step {count} of", output):
                raise Broken(f"{place} {count} was not taken:\n{output[-3000:]}")
            if what == "rollouts" and not re.search(rf"resumed: {count} of \d+ shards of rollouts", output):
                raise Broken(f"{count} shards of {place} were not taken:\n{output[-3000:]}")

    def pause(self, most: float) -> None:
        """A random pause."""
        time.sleep(self.rng.uniform(0.0, most))


Play = Callable[[Scene], None]

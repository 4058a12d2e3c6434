"""Every file operation of a run fails once: `python -m tests.faults.files --help`.

A scene is the recipe `smoke` on a store that lacks the artifacts of one stage. A trial has the n-th operation on a path
of the store fail with EIO, or ENOSPC where it writes, and gives the same command again without a fault, after which all
must be as after a calm run. Operations are those of `storm/shim.c`: open, read, write, truncate, sync, stat, list, make
a folder, link, rename, remove. Flow and worker are one process here, so that a trial takes a second; the store alone is
in `tests.faults.store_life`.
"""

import argparse
import contextlib
import errno
import io
import itertools
import json
import mmap
import os
import random
import re
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.stages.store import disk
from rlhf.stages.store.artifacts import Store
from rlhf.stages.worker.client import CodeChanged, StageFailed, StageOutage, Worker
from rlhf.stages.worker.protocol import Report, Request
from rlhf.tuning.atomic import is_partial
from tests.faults.storm.ground import SETTINGS, Broken, committed, digests
from tests.faults.storm.moments import STAGES
from tests.faults.storm.power import shim
from tests.faults.storm.table import read

SCENES = (*(stage for stage in STAGES if stage != "preference"), "nothing")
CODES = (errno.ENOSPC, errno.EIO)
LEFT = ("leases/", "work/", "damaged/", "replaced/")
OF_DESCRIPTORS = ("read", "write", "sync", "truncate")
TRANSIENT = re.compile(r"^\.(.+)\.\d+-\w{8}\.part$")


def run_here(
    worker: Worker, request: Request, on_event: Callable[[Report], None], check_time: Any = None
) -> dict[str, Any]:
    """As `Worker.run`, in this process."""
    from rlhf.stages.common.compilation import configure_jax
    from rlhf.stages.worker import loaded_code
    from rlhf.stages.worker.process import Events, failure_of, run_request

    class Here(Events):
        def send(self, event: Any) -> None:
            on_event(event)

    configure_jax()
    memory = worker.__dict__.setdefault("memory", {})
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return run_request(request, memory, Here(io.StringIO()))
        except loaded_code.CodeDiffers as e:
            raise CodeChanged(str(e)) from e
        except Exception as e:
            found = failure_of(e, request.store)
            kind = StageOutage if found.outage else StageFailed
            raise kind(f"{found.error}\n  traceback in {worker.log}") from e


class Faults:
    """The operations on a store in `folder` of the processes that have the environment `prepared(folder)`."""

    def __init__(self, folder: Path):
        self.folder, self.store = folder, folder / "store"
        with (folder / "fault").open("r+b") as file:
            self._fault = mmap.mmap(file.fileno(), 24)

    def arm(self, number: int) -> None:
        """Has the operation of this number fail; -1: none, and all are logged."""
        (self.folder / "log").write_text("")
        self._fault[:] = struct.pack("lll", 0, number, CODES[number % 2])

    def disarm(self) -> tuple[str, str]:
        """The operation that has failed since `arm`, and its path; empty if none has."""
        self._fault[:] = bytes(24)
        return next(iter(self.lines("!")), ("", ""))

    def lines(self, mark: str) -> list[tuple[str, str]]:
        """Operation and path of the lines of the log that begin with a mark."""
        lines = (self.folder / "log").read_text(errors="replace").split("\n")
        found = [line.split("\t")[1:3] for line in lines if line.startswith(mark)]
        return [(operation, path.replace(f"{self.store}/", "")) for operation, path in found]


class Trials(Faults):
    """A run's store that is made for each trial, and the operation that fails."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.calm = folder / "calm"
        Worker.run = run_here  # type: ignore[method-assign, assignment]
        if not self.calm.exists():
            shutil.rmtree(self.store, ignore_errors=True)
            code, output = self.command()
            assert code == 0, output
            self.store.rename(self.calm)
        self.wanted = digests(str(self.calm), "run")

    def rlhf(self, *words: str) -> tuple[int, str]:
        """Exit status and output of a command in this process."""
        from typer.testing import CliRunner

        from rlhf.flows.cli.app import app

        result = CliRunner().invoke(app, [*words, "--store", str(self.store)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            import traceback

            return 99, result.output + "".join(traceback.format_exception(result.exception))
        return result.exit_code, result.output

    def command(self) -> tuple[int, str]:
        values = SETTINGS | {"retries": 0, "sft.checkpoint_every": 4, "reward.checkpoint_every": 2}
        sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        return self.rlhf("run", "smoke", "--name", "run", "--no-prefect", *sets)

    def partly(self, scene: str) -> None:
        """The calm store without the artifacts of a stage, and without the record of its run."""
        shutil.rmtree(self.store, ignore_errors=True)
        for folder in (self.calm / "artifacts").iterdir():
            if folder.name != scene:
                shutil.copytree(folder, self.store / "artifacts" / folder.name)
        shutil.copytree(self.calm / "sources", self.store / "sources")

    def order(self, scene: str, rng: random.Random, seen: set[tuple[str, str]]) -> list[int]:
        """The numbers of a scene's operations: one of each operation on each kind of file, then another one, ...

        seen: what other scenes have, which comes last; gets what this one has."""
        self.partly(scene)
        self.arm(-1)
        code, output = self.command()
        assert code == 0, output
        self.disarm()
        kinds: dict[tuple[str, str], list[int]] = {}
        for number, (operation, path) in enumerate(self.lines("?"), 1):
            kinds.setdefault((operation, kind_of(path, scene)), []).append(number)
        for numbers in kinds.values():
            rng.shuffle(numbers)
        new, old = ([found for kind, found in kinds.items() if (kind in seen) is known] for known in (False, True))
        print(f"{scene}: {sum(map(len, new + old))} operations, {len(new)} on kinds of files of this scene", flush=True)
        seen |= kinds.keys()
        return [n for some in (new, old) for row in itertools.zip_longest(*some) for n in row if n is not None]

    def play(self, scene: str, number: int) -> dict[str, Any]:
        """One trial: the operation, and how it ended."""
        self.partly(scene)
        before, started, end = committed(str(self.store)), time.monotonic(), "as calm"
        self.arm(number)
        code, output = self.command()
        operation, path = self.disarm()
        try:
            self._check(code, output, operation, path, before)
        except Broken as error:
            end = str(error)
        seconds = round(time.monotonic() - started, 2)
        output = "" if code == 0 and end == "as calm" else output[-2500:]
        found = {"scene": scene, "number": number, "operation": operation, "path": path, "code": code}
        return found | {"output": output, "end": end, "seconds": seconds}

    def _check(self, code: int, output: str, operation: str, path: str, before: dict[tuple[str, str], str]) -> None:
        if "Traceback (most recent call last)" in output:
            raise Broken("a traceback")
        if code != 0:
            self._told(output, operation, path)
        self._whole()
        if code != 0:
            code, again = self.command()
            if code != 0:
                raise Broken(f"the same command ended with {code}:\n{again[-3000:]}")
            self._whole()
        found = digests(str(self.store), "run")
        if other := sorted(name for name in self.wanted if found.get(name) != self.wanted[name]):
            raise Broken(f"other bits than in the calm run: {other}")
        now = committed(str(self.store))
        if again_made := [place for place, when in before.items() if now.get(place) != when]:
            raise Broken(f"made again: {again_made}")
        made = [str(p.relative_to(self.store)) for p in self.store.rglob("*") if p.is_file()]
        left = [name for name in made if name.startswith(LEFT) or is_partial(Path(name))]
        # A file that could not be removed: a collection takes it.
        left = [name for name in left if name != path]
        # Processes of rewards, and their folders, stay for the next run of this process.
        left += [p.name for p in (self.folder / "tmp").iterdir() if not p.name.startswith("rlhf-jobs-")]
        if left:
            raise Broken(f"left over: {left}")
        code, output = self.rlhf("audit", "run")
        if code != 0:
            raise Broken(f"rlhf audit ended with {code}:\n{output[-2000:]}")

    def _told(self, output: str, operation: str, path: str) -> None:
        """Raises Broken where the error names no cause, no file (which that of a descriptor does not) or no remedy."""
        # `os.makedirs` takes a failed look at a folder for a file of that name.
        if not any(os.strerror(code) in output for code in (*CODES, errno.EEXIST)):
            raise Broken("the error does not name its cause")
        name = Path(path).name
        name = match[1] if (match := TRANSIENT.match(name)) else name
        if name not in output and not (operation in OF_DESCRIPTORS and str(self.store) in output):
            raise Broken("the error does not name the file")
        if "same command" not in output:
            raise Broken("the error names no remedy")

    def _whole(self) -> None:
        """Raises Broken where an artifact that can be seen is not whole."""
        store = Store(str(self.store))
        disk._whole.clear()
        for stage, key in store.all_keys():
            artifact, fault = store.examine(stage, key)
            fault = fault or (store.verify(artifact) if artifact else "no manifest")
            if fault:
                raise Broken(f"{stage}/{key[:12]} is visible and not whole: {fault}")


def kind_of(path: str, scene: str) -> str:
    """A path without what differs between files of one kind; stages whose artifacts are there are all alike."""
    there = "|".join(stage for stage in STAGES if stage != scene)
    return re.sub(r"[0-9a-f]{8,}|\d+", "#", re.sub(f"^(artifacts|leases|work)/({there})", r"\1/@", path))


def prepared(folder: Path) -> dict[str, str]:
    """The environment of a process whose file operations can fail."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    (folder / "fault").write_bytes(bytes(24))
    environment = {"LD_PRELOAD": str(shim(folder)), "STORM_ROOT": str(folder / "store"), "TMPDIR": str(folder / "tmp")}
    environment |= {"STORM_LOG": str(folder / "log"), "STORM_FAIL": str(folder / "fault")}
    return environment | {"RLHF_COMPILE_CACHE": os.environ.get("RLHF_COMPILE_CACHE") or str(folder / "compiled")}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.files", description=__doc__)
    parser.add_argument("--scene", action="append", choices=SCENES, help="stage that is missing; all if left out")
    parser.add_argument("--number", type=int, help="one operation alone")
    parser.add_argument("--trials", type=int, default=sys.maxsize, help="trials of each scene, drawn at random")
    parser.add_argument("--minutes", type=float, default=1e9, help="no new trial after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="given again, the trials go on")
    args = parser.parse_args()
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="rlhf-files-"))).absolute()
    if os.environ.get("STORM_ROOT") != str(folder / "store"):
        words = [sys.executable, "-m", "tests.faults.files", *sys.argv[1:], "--folder", str(folder)]
        from tests.support import QUICK

        os.execve(sys.executable, words, {"XLA_FLAGS": QUICK} | os.environ | prepared(folder))
    trials, results, deadline = Trials(folder), folder / "results.jsonl", time.monotonic() + 60 * args.minutes
    done = {(trial["scene"], trial["number"]): trial for trial in read(results)}
    draws: dict[str, list[int]] = {}
    seen: set[tuple[str, str]] = set()
    for scene in args.scene or SCENES:
        numbers = trials.order(scene, random.Random(f"{args.seed} {scene}"), seen)
        draws[scene] = [args.number] if args.number else numbers[: args.trials]
    most = max(map(len, draws.values()))
    for scene, number in [(s, numbers[i]) for i in range(most) for s, numbers in draws.items() if i < len(numbers)]:
        if time.monotonic() > deadline:
            break
        if (scene, number) in done and not args.number:
            continue
        trial = done[scene, number] = trials.play(scene, number)
        with results.open("a") as file:
            file.write(json.dumps(trial) + "\n")
        if trial["end"] != "as calm":
            print(f"BROKEN {scene} {number}: {trial['operation']} {trial['path']}: {trial['end']}\n{trial['output']}",
                  flush=True)  # fmt: skip
    broken = sum(trial["end"] != "as calm" for trial in done.values())
    print(
        f"{len(done)} trials, {sum(t['code'] == 0 for t in done.values())} that the fault did not end, {broken} broken"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

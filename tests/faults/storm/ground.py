"""What a storm stands on: a calm run, partly made stores, and commands whose processes can be told from all others."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from rlhf.stages.store.artifacts import Store
from tests.faults.storm.moments import STAGES
from tests.support import RLHF

SETTINGS: dict[str, Any] = {
    "sft.checkpoint_every": 1,
    "reward.checkpoint_every": 1,
    "rl.rounds": 2,
    "rl.checkpoint_every": 2,
    "rl.rollout.shard_prompts": 1,
    "rl.score.shard_completions": 4,
    "evaluate.shard_prompts": 2,
}
"""`smoke` in small pieces, so that there is a middle to be struck in."""
RECIPES: dict[str, dict[str, Any]] = {
    "smoke": {},
    "preference": {"preference": '{"epochs": 1, "examples_per_step": 512, "checkpoint_every": 1}'},
}
"""What the recipes of a storm set: `smoke`, and `smoke` with a stage of preference optimisation before its rounds."""
MARK = "STORM_SCENE"
"""The environment variable that names the scene of a process and of all that it starts."""
END_SECONDS = 10.0
"""Time that processes have to notice that whom they worked for is gone."""
PATIENCE = 900.0
"""Seconds that a command, or a moment in it, may take on a busy machine."""
CALM = "calm"
"""The name of the run that nobody disturbs."""
NO_POLISH = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"


class Broken(AssertionError):
    """What must hold after every fault does not."""


class Ground:
    """A folder with the calm run's store of a recipe and what is compiled; scenes have folders of their own in it."""

    def __init__(self, folder: Path, recipe: str = "smoke"):
        self.folder, self.recipe = folder, recipe
        self.calm = folder / f"{CALM}-{recipe}"
        self.compiled = Path(os.environ.get("RLHF_COMPILE_CACHE") or folder / "compiled")
        self._lock = threading.Lock()

    def environment(self, scene: str, **more: str) -> dict[str, str]:
        """The environment of a command of this scene."""
        values = {
            MARK: scene,
            "RLHF_SCRATCH": str(self.folder / scene / "scratch"),
            "RLHF_COMPILE_CACHE": str(self.compiled),
            "PREFECT_HOME": str(self.folder / scene / "prefect"),
            "COLUMNS": "200",
        }
        return {"XLA_FLAGS": NO_POLISH} | os.environ | values | more

    def prepare(self) -> None:
        """Makes the calm run, once for each state of the code."""
        with self._lock:
            done = self.calm / "code"
            if not done.exists() or done.read_text() != _code():
                shutil.rmtree(self.calm, ignore_errors=True)
                run = Command(self, self.calm.name, str(self.calm / "store"), CALM, self.calm.with_suffix(".log"))
                run.ends(0)
                done.write_text(_code())

    def digests(self) -> dict[str, str]:
        """The digest of each node of the calm run."""
        return digests(str(self.calm / "store"), CALM)

    def keys(self) -> dict[str, tuple[str, str]]:
        """(stage, key) of each node of the calm run."""
        nodes = record(str(self.calm / "store"), CALM)["nodes"]
        return {name: (entry["stage"], entry["key"]) for name, entry in nodes.items()}

    def stages(self) -> list[str]:
        """The stages of the calm run, in their order."""
        found = {stage for stage, _ in self.keys().values()}
        return [stage for stage in STAGES if stage in found]

    def partly(self, store: Path, gone: set[str]) -> None:
        """Copies the calm run's artifacts without those of some stages."""
        for folder in sorted((self.calm / "store" / "artifacts").iterdir()):
            if folder.name not in gone:
                shutil.copytree(folder, store / "artifacts" / folder.name)
        shutil.copytree(self.calm / "store" / "sources", store / "sources")


def _code() -> str:
    """A digest of the project's code, with which keys change."""
    project = Path(__file__).parents[3]
    found = [path for name in ("flows", "stages", "tuning") for path in sorted((project / name).rglob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest()


class Command:
    """`rlhf run smoke` as a process group of its own, with its output in a file."""

    def __init__(
        self,
        ground: Ground,
        scene: str,
        store: str,
        name: str,
        log: Path,
        *,
        sets: Mapping[str, Any] = {},
        prefect: bool = False,
        before: tuple[str, ...] = (),
        cwd: Path | None = None,
        force: str | None = None,
        **environment: str,
    ):
        """before: words in front of the command, such as `unshare`."""
        self.store, self.name, self.log, self.scene = store, name, log, scene
        values = SETTINGS | RECIPES[ground.recipe] | {"store": store, "retries": 0} | dict(sets)
        command = [*before, RLHF, "run", "smoke", "--name", name, *([] if prefect else ["--no-prefect"])]
        command += [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        command += ["--force", force] if force else []
        self.started = time.monotonic()
        env = ground.environment(scene, **environment)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=env, cwd=cwd)

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def until(self, reached: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Waits for a moment; False where the command has ended before it."""
        deadline = time.monotonic() + seconds
        while not reached():
            if self.over:
                return False
            if time.monotonic() > deadline:
                raise Broken(f"the moment did not come within {seconds:g} s:\n{self.output()[-3000:]}")
            time.sleep(0.004)
        return True

    def family(self) -> list[psutil.Process]:
        """All processes that the command has started and that live."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def find(self, *words: str) -> list[psutil.Process]:
        """Those of its processes whose command line has all these words."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if all(word in line for word in words):
                    found.append(process)
        return found

    def worker(self) -> psutil.Process | None:
        found = self.find("rlhf.stages.worker.process")
        return found[0] if found else None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit status."""
        try:
            return self.process.wait(timeout=seconds)
        except Exception as error:
            raise Broken(f"the command goes on after {seconds:g} s:\n{self.output()[-3000:]}") from error

    def ends(self, code: int, seconds: float = PATIENCE) -> str:
        """Its output, once it has ended with this status."""
        found = self.wait(seconds)
        if found != code:
            raise Broken(f"{self.name} ended with {found}, not {code}:\n{self.output()[-4000:]}")
        return self.output()


def record(store: str, run: str) -> dict[str, Any]:
    """The record of a run; one without nodes where it has not begun."""
    return Store(store).read_json("runs", run, "run.json") or {"nodes": {}, "status": ""}


def digests(store: str, run: str) -> dict[str, str]:
    """The digest of each node of a run that has one."""
    return {name: e["digest"] for name, e in record(store, run)["nodes"].items() if "digest" in e}


def committed(store: str) -> dict[tuple[str, str], str]:
    """When each artifact of a store was committed: it changes where one is made again."""
    place = Store(store)
    found = {}
    for stage, key in place.all_keys():
        with contextlib.suppress(Exception):
            found[stage, key] = json.loads(place.fs.cat_file(place.join("artifacts", stage, key, "manifest.json")))[
                "committed"
            ]
    return found


def of_scene(scene: str) -> list[psutil.Process]:
    """Every process of a scene that lives, whoever its parent is."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == scene:
                found.append(process)
    return found


def none_left(scene: str) -> None:
    """Raises Broken where a process of a scene lives on. Those are ended."""
    deadline = time.monotonic() + END_SECONDS
    while left := of_scene(scene):
        if time.monotonic() > deadline:
            lines = []
            for process in left:
                with contextlib.suppress(psutil.Error):
                    lines.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
                    process.kill()
            raise Broken("processes are left:\n" + "\n".join(lines))
        time.sleep(0.1)

"""Processes that are killed with signal 9, and processes that are stopped and go on later."""

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter

import psutil

from tests.faults.storm import ground as grounds
from tests.faults.storm.ground import Broken, Command
from tests.faults.storm.moments import ROUNDS, STAGES, choose
from tests.faults.storm.scene import Scene
from tests.flows.prefect_server import Prefect, wait_for

ALONE = ("sft", "preference", "reward", "rollout", "score", "update", "prepare")
GONE = (*((stage,) for stage in ALONE), ROUNDS, ("evaluate", "export"))
"""Stages that are missing in a scene's store: one, or several that follow each other."""


class Strikes:
    """Random moments of the stages that a scene's store lacks, as long as one of them is left to be made."""

    def __init__(self, scene: Scene, gone: tuple[str, ...] = ()):
        there = [stages for stages in GONE if set(stages) <= set(scene.ground.stages())]
        self.scene, self.gone = scene, gone or scene.rng.choice(there)
        scene.partly(*self.gone)
        self.wanted = Counter(stage for stage, _ in set(scene.ground.keys().values()))

    def reach(self, run: Command) -> tuple[str, str] | None:
        """Waits for the next one: (stage, moment); None where the run has ended."""
        scene = self.scene
        stage = scene.rng.choice(self.left() or self.gone)
        label, reached = choose(scene.store, stage, scene.rng)
        if not run.until(reached):
            return None
        scene.pause(scene.rng.choice((0.0, 0.02, 0.3)))
        return stage, label

    def left(self) -> list[str]:
        """The first stages that are not made yet: those behind them have no moments before."""
        made = Counter(stage for stage, _ in grounds.committed(self.scene.url))
        missing = [stage for stage in sorted(self.gone, key=STAGES.index) if made[stage] < self.wanted[stage]]
        return missing[:2]


def kill_worker(scene: Scene) -> None:
    """The worker dies, several times in one run that goes on by itself."""
    strikes = Strikes(scene)
    run = scene.start(sets={"retries": 8})
    for _ in range(6):
        run.until(lambda: run.worker() is not None)
        at, worker = strikes.reach(run), run.worker()
        if at is None or worker is None:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
            scene.struck("kill worker", *at)
            run.until(lambda pid=worker.pid: (w := run.worker()) is None or w.pid != pid)  # type: ignore[misc]
    scene.over(run)
    scene.finish()


def kill_flow(scene: Scene) -> None:
    """The command's own process dies; its worker must follow, and the same command begins at once."""
    strikes = Strikes(scene)
    for _ in range(4):
        run = scene.start()
        at = strikes.reach(run)
        if at is not None and not run.over:
            run.process.kill()
            scene.struck("kill flow", *at)
        if scene.over(run) == 0:
            break
    scene.finish()


def kill_all(scene: Scene) -> None:
    """Flow, worker and all that they have started die in one moment."""
    strikes = Strikes(scene)
    for _ in range(4):
        run = scene.start()
        at = strikes.reach(run)
        if at is None:
            scene.over(run)
            break
        scene.struck("kill all processes", *at)
        scene.cut(run)
    scene.finish()


def kill_reward(scene: Scene) -> None:
    """Processes of reward functions and of the judge of the evaluation die."""
    stage = scene.rng.choice(("score", "score", "evaluate"))
    scene.partly(stage)
    run, struck = scene.start(), set[int]()
    while len(struck) < 20 and not run.over:
        for process in run.find("multiprocessing", "spawn_main"):
            if process.pid not in struck:
                scene.pause(scene.rng.choice((0.05, 0.3, 0.8)))
                with contextlib.suppress(psutil.Error):
                    process.kill()
                    struck.add(process.pid)
                    scene.struck("kill reward process", stage, f"process {len(struck)}")
                break
        time.sleep(0.01)
    scene.over(run)
    scene.finish()


def kill_beam(scene: Scene) -> None:
    """Processes that prepare the data die."""
    scene.partly("prepare")
    sets = {"data.workers": 2, "data.chunk_megabytes": 0.01}
    for _ in range(2):
        run, done = scene.start(sets=sets), False
        while not run.over and not done:
            for process in run.find("multiprocessing", "spawn_main"):
                scene.pause(0.5)
                with contextlib.suppress(psutil.Error):
                    process.kill()
                    scene.struck("kill data process", "prepare", "at work")
                    done = True
                break
            time.sleep(0.01)
        scene.over(run)
        if run.process.returncode == 0:
            break
    scene.finish(sets=sets)


def stop(scene: Scene) -> None:
    """Flow, worker or both are stopped for a while, as by Ctrl-Z, and go on."""
    strikes = Strikes(scene, scene.rng.choice((("sft",), ("reward",), ROUNDS, ("rollout", "evaluate", "export"))))
    run = scene.start()
    for _ in range(16):
        at, worker = strikes.reach(run), run.worker()
        if at is None or worker is None:
            break
        who = scene.rng.choice(("flow", "worker", "both"))
        pids = {"flow": [run.process.pid], "worker": [worker.pid], "both": [run.process.pid, worker.pid]}[who]
        with contextlib.suppress(ProcessLookupError):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            scene.struck(f"stop {who}", *at)
            scene.pause(1.2)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    scene.over(run)
    scene.finish()


def kill_private_server(scene: Scene) -> None:
    """The Prefect server that the command has started for itself dies."""
    strikes = Strikes(scene)
    run = scene.start(prefect=True)
    at = strikes.reach(run)
    for process in run.find("rlhf.flows.orchestration.server") if at is not None else []:
        process.kill()
        scene.struck("kill private Prefect server", *(at or ("", "")))
    scene.over(run, 600)
    if run.process.returncode != 0 and "prefect" not in run.output().lower():
        raise Broken(f"the error does not name Prefect:\n{run.output()[-3000:]}")
    scene.finish()


def kill_own_server(scene: Scene) -> None:
    """A Prefect server of one's own dies, and is started again while the run goes on, or after it."""
    strikes = Strikes(scene)
    place = scene.folder / "server"
    place.mkdir()
    # Not one of the command's processes, none of which may be left.
    prefect = Prefect(place)
    url = prefect.env["PREFECT_API_URL"]
    with contextlib.ExitStack() as stack:

        def serve() -> subprocess.Popen[bytes]:
            words = ("server", "start", "--host", "127.0.0.1", "--port", str(prefect.port))
            process = stack.enter_context(prefect.running("server", *words))
            wait_for(prefect.healthy, 120, "the Prefect server")
            return process

        server = serve()
        run = scene.start(prefect=True, PREFECT_API_URL=url)
        at = strikes.reach(run)
        if at is not None:
            server.kill()
            server.wait()
            scene.struck("kill own Prefect server", *at)
            if scene.rng.random() < 0.5:
                server = serve()
        scene.over(run, 900)
        if server.poll() is not None:
            serve()
        scene.finish(prefect=True, PREFECT_API_URL=url)


def rivals(scene: Scene) -> None:
    """Two runs of one recipe on one store at once; processes of both are killed, and both go on."""
    scene.partly(*scene.rng.choice((("sft",), ROUNDS, ("reward",), ("score", "evaluate"))))
    names = ("one", "two")
    runs = {name: scene.start(name) for name in names}
    for _ in range(4):
        name = scene.rng.choice(names)
        run = runs[name]
        scene.pause(6.0)
        if run.over:
            continue
        who = scene.rng.choice(("flow", "worker"))
        victim = psutil.Process(run.process.pid) if who == "flow" else run.worker()
        if victim is None:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            stage = _running(scene, name)
            victim.kill()
            scene.struck(f"two runs at once: kill {who}", stage, "at any moment")
        scene.over(run)
        runs[name] = scene.start(name)
    for run in runs.values():
        scene.over(run)
    for name in names:
        scene.finish(name)


def _running(scene: Scene, name: str) -> str:
    """The stage that a run makes at present."""
    nodes = grounds.record(scene.url, name)["nodes"]
    return next((e["stage"] for e in nodes.values() if e["state"] == "running"), "between stages")

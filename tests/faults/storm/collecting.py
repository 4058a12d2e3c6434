"""Collections, promotions and forced stages beside a run: what it has found stays, and it ends as a calm one."""

import contextlib

import psutil

from tests.faults.storm import ground as grounds
from tests.faults.storm.ground import Broken
from tests.faults.storm.kills import Strikes
from tests.faults.storm.scene import Scene

COLLECT = ("gc", "--keep", "0", "--grace", "0", "--yes")


def collect(scene: Scene) -> None:
    """`rlhf gc` beside a run that begins, whose worker is killed at random moments; in the end a promotion holds its
    policy against a collection of everything else."""
    strikes = Strikes(scene)
    run = scene.start(sets={"retries": 8})
    for _ in range(3):
        at = strikes.reach(run)
        if at is None:
            break
        found = _found(scene)
        # What the run has not asked for yet may go, and is computed again.
        scene.damaged |= {place for place in scene.before if place not in found}
        scene.says([*COLLECT, "--store", scene.url])
        scene.struck("collection beside a run", *at)
        if not grounds.record(scene.url, run.name).get("nodes"):
            # It was finished before the collection looked, which keeps no run that is.
            scene.damaged |= found
            if scene.over(run) != 0:
                raise Broken(f"a collection has removed the record of a live run:\n{run.output()[-3000:]}")
            break
        if gone := found - grounds.committed(scene.url).keys():
            raise Broken(f"a collection has removed what a live run had found: {sorted(gone)}")
        worker = run.worker()
        if worker is not None and scene.rng.random() < 0.5:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
                scene.struck("kill worker after a collection", *at)
    scene.over(run)
    scene.finish()
    scene.says(["promote", run.name, "--store", scene.url, "--reason", "storm"])
    scene.says([*COLLECT, "--store", scene.url])
    scene.check(run.name)


def force(scene: Scene) -> None:
    """One run forces a stage that another one computes or reads at that moment; both end with the calm run's bits."""
    strikes = Strikes(scene)
    run = scene.start()
    at = strikes.reach(run)
    if at is not None:
        stage = scene.rng.choice(("sft", "reward", "evaluate"))
        scene.damaged |= {place for place in scene.before if place[0] == stage} | {
            (stage, key) for other, key in scene.ground.keys().values() if other == stage
        }
        forced = scene.start("forced", force=stage)
        scene.struck(f"forced {stage} beside a run", *at)
        scene.says([*COLLECT[:1], "--store", scene.url])
        scene.over(forced)
    scene.over(run)
    scene.finish()
    if at is not None:
        scene.finish("forced")


def _found(scene: Scene) -> set[tuple[str, str]]:
    """(stage, key) of what the run's record names."""
    nodes = grounds.record(scene.url, "run").get("nodes", {}).values()
    return {(entry["stage"], entry["key"]) for entry in nodes if "digest" in entry}

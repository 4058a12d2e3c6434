"""`make faults`: random faults on the recipe `smoke`, each scene of which must end as an undisturbed run does."""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults.storm import collecting, files, kills, network, power, table
from tests.faults.storm.ground import RECIPES, Broken, Ground, of_scene
from tests.faults.storm.scene import Play, Scene

SCENES: dict[str, Play] = {
    "kill-worker": kills.kill_worker,
    "work": files.work,
    "power": power.power,
    "stop": kills.stop,
    "kill-reward": kills.kill_reward,
    "artifacts": files.artifacts,
    "kill-flow": kills.kill_flow,
    "full-disk": files.full_disk,
    "leases": files.leases,
    "kill-all": kills.kill_all,
    "rivals": kills.rivals,
    "weather": network.weather,
    "collect": collecting.collect,
    "force": collecting.force,
    "kill-beam": kills.kill_beam,
    "clocks": files.clocks,
    "hosts": network.hosts,
    "private-server": kills.kill_private_server,
    "own-server": kills.kill_own_server,
}
SELDOM = ("clocks", "hosts", "private-server", "own-server", "kill-beam", "weather")
"""Scenes of which every third round of the others has one: each takes a minute or more of waiting."""
NEW_NAMESPACE = 0x00020000


def plan() -> Any:
    """Names of scenes without end."""
    number = 0
    while True:
        for name in SCENES:
            if name not in SELDOM or number % 3 == 0:
                yield f"{name}-{number:03d}"
        number += 1


def own_mounts() -> None:
    """What this process mounts is seen by it and its children alone, and gone with them."""
    if os.geteuid() == 0 and ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMESPACE) == 0:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def play(ground: Ground, name: str, seed: int) -> dict[str, Any]:
    """Plays one scene; what it was and how it ended."""
    scene, started, end = Scene(ground, name, seed), time.monotonic(), "as calm"
    try:
        SCENES[name.rpartition("-")[0]](scene)
    except Broken as error:
        end = str(error)
    except Exception:
        end = traceback.format_exc()
    for process in of_scene(scene.name):
        process.kill()
    return {
        "scene": name,
        "recipe": ground.recipe,
        "seed": seed,
        "end": end,
        "tries": scene.tries,
        "seconds": round(time.monotonic() - started, 1),
        "faults": [asdict(fault) for fault in scene.faults],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.storm", description=__doc__)
    parser.add_argument("--faults", type=int, default=300, help="of each recipe and seed, without those of the network")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="storms of each recipe, with this seed and those after it")
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="repeatable; smoke if left out")
    parser.add_argument("--scene", action="append", help="kind (kill-worker) or one scene (kill-worker-003)")
    parser.add_argument("--jobs", type=int, default=2, help="scenes at a time")
    parser.add_argument("--minutes", type=float, default=1e9, help="no new scene after so long")
    parser.add_argument("--folder", type=Path, help="where scenes are played; given again, the storm goes on")
    parser.add_argument("--table", type=Path, help="page to write the table to")
    parser.add_argument("--keep", action="store_true", help="keep the folders of scenes that ended well")
    args = parser.parse_args()
    own_mounts()
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="rlhf-storm-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.jsonl"
    power.shim(folder)
    grounds = [Ground(folder, recipe) for recipe in args.recipe or ["smoke"]]
    for ground in grounds:
        ground.prepare()
    done = table.read(results)
    deadline, lock = time.monotonic() + 60 * args.minutes, threading.Lock()

    storms = [(ground, seed) for seed in range(args.seed, args.seed + args.seeds) for ground in grounds]

    def played(ground: Ground, seed: int) -> list[dict[str, Any]]:
        return [s for s in done if (s.get("recipe", "smoke"), s["seed"]) == (ground.recipe, seed)]

    def struck(scenes: list[dict[str, Any]]) -> int:
        return sum(not fault["network"] for scene in scenes for fault in scene["faults"])

    def turns() -> Any:
        """A scene of each storm, then another one, until each has had its faults."""
        left = {storm: _chosen(args.scene, plan(), {s["scene"] for s in played(*storm)}) for storm in storms}
        while left:
            for storm in list(left):
                enough = struck(played(*storm)) >= args.faults
                name = None if enough else next(left[storm], None)
                if name is None:
                    del left[storm]
                else:
                    yield *storm, name

    scenes = turns()

    def player() -> None:
        while time.monotonic() < deadline:
            with lock:
                turn = next(scenes, None)
            if turn is None:
                return
            ground, seed, name = turn
            result = play(ground, name, seed)
            place = folder / f"{ground.recipe}-{seed}-{name}"
            with lock:
                done.append(result)
                with results.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                well = result["end"] == "as calm"
                said = "ok    " if well else "BROKEN"
                about = f"{len(result['faults'])} faults, {result['seconds']:g} s, {struck(done)} in all"
                print(f"{said} {place.name}  {about}", flush=True)
                print("" if well else f"{result['end']}\n  in {place}\n", end="", flush=True)
            if well and not args.keep:
                subprocess.run(["rm", "-rf", place], check=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        for future in [pool.submit(player) for _ in range(args.jobs)]:
            future.result()
    text = table.page(done)
    print(text)
    if args.table:
        args.table.write_text(text)
    short = [storm for storm in storms if struck(played(*storm)) < args.faults]
    return 0 if all(scene["end"] == "as calm" for scene in done) and not short else 1


def _chosen(wanted: list[str] | None, every: Any, played: set[str]) -> Any:
    """Names of scenes to play, without those that were."""
    exact = [name for name in wanted or [] if name not in SCENES]
    yield from (name for name in exact if name not in played)
    if wanted and len(exact) == len(wanted):
        return
    for name in every:
        if name not in played and (not wanted or name.rpartition("-")[0] in wanted):
            yield name


if __name__ == "__main__":
    sys.exit(main())

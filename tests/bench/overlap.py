"""Time of rounds whose stages run beside each other, against the longest path through them and against one worker.

`python -m tests.bench.overlap --rounds 8 --write` runs the recipe `smoke` whole: by one worker, and with a worker each
for training, sampling and scoring, without staleness and with 1. Each stage of a round is made to last a known time
(its worker is held until then), so that the cores of this machine decide nothing. What is printed is the time from the
first rollout's start to the last update's end, and the longest path: of stages behind what they read, and behind what
their worker made before them. The command fails where a run is more than 10 % above it, or where digests are not those
of one worker.

`--shards` measures rounds whose rewards are slow instead: a shard of rollouts is finished every few seconds (the worker
that samples is held until then), and a call of the reward lasts one. The time is that from the start of the second
round's rollout to the end of its score: workers are started in the first one. The longest path of one worker is
sampling, then all scores; of several, sampling, then the score of the last shard.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results" / "overlap.json"
SECONDS = {"rollout": 3.0, "score": 1.0, "update": 3.0}
"""How long a stage of a round lasts."""
ABOVE = 1.10
WORKERS = ["workers.train={}", "workers.sample={}", "workers.score={}"]
TO_LEAVE = ["evaluate=null", "export=null"]
SHARDS, SHARD_SECONDS = 9, 4.0
"""Shards of a rollout, each of one prompt, and the time between their ends."""
COMPLETIONS, CALL_SECONDS, PROCESSES = 4, 1.0, 2
"""Completions of a prompt, and the calls of the reward: how long each is, and how many there are at a time."""
REWARD = f"""
import time

def slow(prompts, completions, **_):
    time.sleep({CALL_SECONDS} * len(completions))
    return [float(len(c)) for c in completions]
"""
SLOW_REWARD = [
    "rl.rounds=2", "reward=null", f"rl.rollout.prompts={SHARDS}", f"rl.rollout.completions={COMPLETIONS}",
    "rl.rollout.shard_prompts=1", f"rl.score.workers={PROCESSES}", "rl.update.prompts_per_step=3",
    "rl.score.rewards.exact.function=slow_reward:slow", "rl.score.rewards.model.function=exact_match",
]  # fmt: skip


def measured(folder: Path, name: str, sets: list[str]) -> tuple[Any, Any]:
    """The recipe and the record of a run."""
    from flows.recipe.reading import load_recipe
    from flows.running.plain import run_plain
    from stages.store import runs
    from stages.store.artifacts import Store

    recipe = load_recipe("smoke", sets=[f"store={folder / name}", *TO_LEAVE, *sets])
    run_plain(recipe, name=name)
    return recipe, runs.read(Store(recipe.store), name)


def slowed() -> None:
    """Has each stage last its time."""
    from flows.running.crew import Crew

    made = Crew.run

    def run(self: Crew, node: Any, *arguments: Any) -> Any:
        began = time.monotonic()
        found = made(self, node, *arguments)
        time.sleep(max(0.0, SECONDS.get(node.stage, 0.0) - (time.monotonic() - began)))
        return found

    Crew.run = run  # type: ignore[method-assign]


def took(record: dict[str, Any]) -> float:
    """Seconds from the start of the first stage of a round to the end of the last."""
    spans = [
        (datetime.datetime.fromisoformat(e["started"]).timestamp(), e["seconds"])
        for name, e in record["nodes"].items()
        if name.startswith("round-")
    ]
    return max(start + seconds for start, seconds in spans) - min(start for start, _ in spans)


def longest_path(recipe: Any, record: dict[str, Any]) -> float:
    """The least time for the rounds by the seconds of their stages, each behind what it reads and behind what its
    worker made before."""
    from flows.graph.build import build
    from flows.running.crew import worker_of

    nodes = {n.name: n for n in build(recipe)}
    rounds = [n for n in nodes if n.startswith("round-")]
    free: dict[str, float] = {}
    ends: dict[str, float] = {}
    for name in sorted(rounds, key=lambda n: record["nodes"][n]["started"]):
        worker = worker_of(recipe.workers, nodes[name])
        read = [ends.get(i.node, 0.0) for i in nodes[name].inputs.values()]
        ends[name] = free[worker] = max([free.get(worker, 0.0), *read]) + SECONDS[nodes[name].stage]
    return max(ends.values())


@contextlib.contextmanager
def held(work: Path, worker: Any) -> Iterator[None]:
    """Within it no shard below `work` is begun by a worker before its time; the first is as fast as it is."""
    began = time.monotonic()
    over = threading.Event()

    def hold() -> None:
        while not over.wait(0.002):
            finished = len(list(work.glob(".sealed/rollouts-*")))
            if not 0 < finished < SHARDS or (left := finished * SHARD_SECONDS - (time.monotonic() - began)) <= 0:
                continue
            process = psutil.Process(worker.pid)
            process.suspend()
            over.wait(left)
            process.resume()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def sampled_slowly() -> None:
    """Has each shard of a rollout be finished at its time."""
    from flows.running.crew import Crew
    from stages.store.artifacts import Store
    from stages.store.work import WorkFolder

    made = Crew.run

    def run(self: Crew, node: Any, request: Any, *arguments: Any) -> Any:
        worker = self.here(self.of(node))
        if node.stage != "rollout":
            return made(self, node, request, *arguments)
        work = WorkFolder(Store(request.store), node.stage, request.key).path
        with held(work, worker):
            return made(self, node, request, *arguments)

    Crew.run = run  # type: ignore[method-assign]


def of_shards(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of rounds with a slow reward, and what is wrong with them."""
    (folder / "slow_reward.py").write_text(REWARD)
    sys.path.insert(0, str(folder))
    measured(folder, "warm", [*SLOW_REWARD, "rl.score.rewards.exact.function=exact_match"])
    sampled_slowly()
    rows, failed, digests = [], [], []
    score = COMPLETIONS * CALL_SECONDS / PROCESSES
    sampling = (SHARDS - 1) * SHARD_SECONDS
    for workers, extra, least in (("one", [], sampling + SHARDS * score), ("three", WORKERS, sampling + score)):
        _, record = measured(folder, f"shards-{workers}", [*SLOW_REWARD, *extra])
        nodes = record["nodes"]
        seconds = _between(nodes["round-001.rollout"], nodes["round-001.score"])
        rows.append({"workers": workers, "seconds": round(seconds, 1), "path": least})
        print(json.dumps(rows[-1]), flush=True)
        if seconds > ABOVE * least:
            failed.append(f"{workers}: {seconds:.1f} s, the longest path is {least:.1f}")
        digests.append({n: (e["key"], e["digest"]) for n, e in nodes.items()})
    return rows, failed + (["digests differ"] if digests[0] != digests[1] else [])


def _between(first: dict[str, Any], last: dict[str, Any]) -> float:
    """Seconds from the start of one node to the end of another."""
    start, then = (datetime.datetime.fromisoformat(entry["started"]).timestamp() for entry in (first, last))
    return then + last["seconds"] - start


def of_stages(folder: Path, count: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of so many rounds whose stages last their time, and what is wrong with them."""
    rows, failed = [], []
    for staleness in (0, 1):
        # Whatever compiles has done so before anything is timed.
        measured(folder, f"warm-{staleness}", [f"rl.rounds={3}", f"rl.staleness={staleness}"])
    slowed()
    for staleness in (0, 1):
        sets = [f"rl.rounds={count}", f"rl.staleness={staleness}"]
        found = {
            w: measured(folder, f"{w}-{staleness}", sets + extra) for w, extra in (("one", []), ("three", WORKERS))
        }
        digests = [{n: (e["key"], e["digest"]) for n, e in record["nodes"].items()} for _, record in found.values()]
        for workers, (recipe, record) in found.items():
            seconds, least = took(record), longest_path(recipe, record)
            rows.append(
                {"staleness": staleness, "workers": workers, "seconds": round(seconds, 1), "path": round(least, 1)}
            )
            print(json.dumps(rows[-1]), flush=True)
            if seconds > ABOVE * least:
                failed.append(f"{workers} with staleness {staleness}: {seconds:.1f} s, the longest path is {least:.1f}")
        if digests[0] != digests[1]:
            failed.append(f"digests with staleness {staleness} differ")
    return rows, failed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overlap", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--shards", action="store_true", help="rounds with slow rewards")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["RLHF_COMPILE_CACHE"] = str(Path(temporary) / "compiled")
        rows, failed = of_shards(Path(temporary)) if args.shards else of_stages(Path(temporary), args.rounds)
    if args.write:
        results = json.loads(RESULTS.read_text())
        if args.shards:
            each = {"shards": SHARDS, "shard": SHARD_SECONDS, "calls": SHARDS * COMPLETIONS, "call": CALL_SECONDS}
            results["slow rewards"] = {"each": each, "rows": rows}
        else:
            processor = platform.processor() or platform.machine()
            results |= {"processor": processor, "rounds": args.rounds, "each": SECONDS, "rows": rows}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()

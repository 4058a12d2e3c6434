"""Time of rounds whose stages run beside each other, against the longest path through them and against one worker.

`python -m tests.bench.overlap --rounds 8 --write` runs the recipe `smoke` whole: by one worker, and with a worker each
for training, sampling and scoring, without staleness and with 1. Each stage of a round is made to last a known time
(its worker is held until then), so that the cores of this machine decide nothing. What is printed is the time from the
first rollout's start to the last update's end, and the longest path: of stages behind what they read, and behind what
their worker made before them. The command fails where a run is more than 10 % above it, or where digests are not those
of one worker.
"""

import argparse
import datetime
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "overlap.json"
SECONDS = {"rollout": 3.0, "score": 1.0, "update": 3.0}
"""How long a stage of a round lasts."""
ABOVE = 1.10
WORKERS = ["workers.train={}", "workers.sample={}", "workers.score={}"]
TO_LEAVE = ["evaluate=null", "export=null"]


def measured(folder: Path, name: str, sets: list[str]) -> tuple[Any, Any]:
    """The recipe and the record of a run."""
    from rlhf.flows.recipe.reading import load_recipe
    from rlhf.flows.running.runner import run_plain
    from rlhf.stages.store import runs
    from rlhf.stages.store.artifacts import Store

    recipe = load_recipe("smoke", sets=[f"store={folder / name}", *TO_LEAVE, *sets])
    run_plain(recipe, name=name)
    return recipe, runs.read(Store(recipe.store), name)


def slowed() -> None:
    """Has each stage last its time."""
    from rlhf.flows.running.crew import Crew

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
    from rlhf.flows.graph.build import build
    from rlhf.flows.running.crew import worker_of

    nodes = {n.name: n for n in build(recipe)}
    rounds = [n for n in nodes if n.startswith("round-")]
    free: dict[str, float] = {}
    ends: dict[str, float] = {}
    for name in sorted(rounds, key=lambda n: record["nodes"][n]["started"]):
        worker = worker_of(recipe.workers, nodes[name])
        read = [ends.get(i.node, 0.0) for i in nodes[name].inputs.values()]
        ends[name] = free[worker] = max([free.get(worker, 0.0), *read]) + SECONDS[nodes[name].stage]
    return max(ends.values())


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
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["RLHF_COMPILE_CACHE"] = str(Path(temporary) / "compiled")
        rows, failed = of_stages(Path(temporary), args.rounds)
    if args.write:
        results = json.loads(RESULTS.read_text())
        processor = platform.processor() or platform.machine()
        results |= {"processor": processor, "rounds": args.rounds, "each": SECONDS, "rows": rows}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()

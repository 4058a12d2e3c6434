"""Do small models learn from environments? Runs recipes whole, from several seeds, and compares policies with levels.

`python -m tests.bench.agents guess calculator` runs each recipe from three seeds by `rlhf run`, as a user would, and
writes tests/bench/results/agents.json: held-out success before, after SFT and after RL with its interval over
tasks, what random and blind play reach on the same tasks, and seconds. What is finished in the store is not run again.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlhf.flows.records import find_run
from rlhf.flows.report.measures import finished_rounds
from rlhf.stages.store.artifacts import Store

RESULTS = Path(__file__).parent / "results" / "agents.json"
POLICIES = ("base", "sft", "rl")


def run(recipe: str, seed: int, store: str) -> dict[str, Any]:
    """One recipe from one seed, and what it reached."""
    name = f"{recipe}-{seed}"
    started = time.monotonic()
    command = [sys.executable, "-m", "rlhf.flows.cli.app", "run", recipe, "--no-prefect"]
    subprocess.run([*command, "--store", store, "--name", name, "--set", f"seed={seed}"], check=True)
    seconds = time.monotonic() - started
    record = find_run(Store(store), name)
    metrics = {p: record["nodes"][f"evaluate.{p}"]["metrics"] for p in POLICIES}
    last = metrics["rl"]
    return {
        "seed": seed,
        "levels": last["levels"],
        "episodes": last["samples"] * last["problems"],
        "score": {p: [round(m[k], 4) for k in ("score", "score_low", "score_high")] for p, m in metrics.items()},
        "rounds": len(finished_rounds(record)),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.agents", description=__doc__)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--store", default="artifacts-agents")
    args = parser.parse_args()
    known = json.loads(RESULTS.read_text())["recipes"] if RESULTS.exists() else {}
    for recipe in args.recipes:
        earlier = {of["seed"]: of for of in known.get(recipe, [])}
        for seed in args.seeds:
            now = run(recipe, seed, args.store)
            # A run that was in the store says nothing of its time.
            if seed in earlier and now["score"] == earlier[seed]["score"]:
                now["seconds"] = max(now["seconds"], earlier[seed]["seconds"])
            earlier[seed] = now
            known[recipe] = [earlier[s] for s in sorted(earlier)]
            RESULTS.write_text(json.dumps({"cores": os.cpu_count(), "recipes": known}, indent=1) + "\n")
            print(json.dumps(now))


if __name__ == "__main__":
    main()

"""Do small models learn from environments? Runs recipes whole, from several seeds, and compares policies with levels.

`python -m tests.bench.agents guess calculator` runs each recipe from three seeds by `rlhf run`, as a user would, and
writes tests/bench/results/agents.json and .png: held-out success before, after SFT and after RL with its interval over
tasks, what random and blind play reach on the same tasks, success of each round's rollouts, and seconds. What is
finished in the store is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlhf.flows.records import find_run
from rlhf.flows.report.measures import finished_rounds, round_series
from rlhf.stages.store.artifacts import Store

RESULTS = Path(__file__).parent / "results"
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
    made = {n: node.get("made_seconds") or 0.0 for n, node in record["nodes"].items()}
    series = round_series(record)
    last = metrics["rl"]
    return {
        "seed": seed,
        "levels": last["levels"],
        "episodes": last["samples"] * last["problems"],
        "score": {p: [round(m[k], 4) for k in ("score", "score_low", "score_high")] for p, m in metrics.items()},
        "above_blind": round(last["score"] - last["levels"]["blind"], 4),
        # Tools alone tell no success: the reward is of the answer.
        "success": series["success"] if any(s is not None for s in series["success"]) else series["reward"],
        "calling": series["calling"],
        "rounds": len(finished_rounds(record)),
        "seconds": round(seconds, 1),
        "seconds_made": round(sum(made.values()), 1),
    }


def plot(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(found), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (recipe, runs) in enumerate(found.items()):
        axes = figure.add_subplot(1, len(found), place + 1)
        for number, of in enumerate(runs):
            colour = f"C{number}"
            rounds = range(1, len(of["success"]) + 1)
            axes.plot(rounds, of["success"], color=colour, linewidth=1.4, label=f"seed {of['seed']}")
            if any(of["calling"]):
                axes.plot(rounds, of["calling"], color=colour, linewidth=1, linestyle=":")
            score, low, high = of["score"]["rl"]
            after = len(of["success"]) + 1
            axes.errorbar([after], [score], [[score - low], [high - score]], color=colour, marker="o", capsize=3)
        for level in ("random", "blind"):
            style = "--" if level == "blind" else ":"
            axes.axhline(runs[0]["levels"][level], color="0.5", linewidth=0.8, linestyle=style)
        title = recipe + (" (dotted: share that calls)" if any(runs[0]["calling"]) else "")
        axes.set(title=title, ylim=(-0.02, 1.02), xlabel="round; dots: held out", ylabel="success")
        axes.grid(alpha=0.2)
        axes.legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.agents", description=__doc__)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--store", default="artifacts-agents")
    args = parser.parse_args()
    path = RESULTS / "agents.json"
    known = json.loads(path.read_text())["recipes"] if path.exists() else {}
    for recipe in args.recipes:
        earlier = {of["seed"]: of for of in known.get(recipe, [])}
        for seed in args.seeds:
            now = run(recipe, seed, args.store)
            # A run that was in the store says nothing of its time.
            if seed in earlier and now["score"] == earlier[seed]["score"]:
                now["seconds"] = max(now["seconds"], earlier[seed]["seconds"])
            earlier[seed] = now
            known[recipe] = [earlier[s] for s in sorted(earlier)]
            path.write_text(json.dumps({"cores": os.cpu_count(), "recipes": known}, indent=1) + "\n")
            print(json.dumps(now))
    plot(known, RESULTS / "agents.png")


if __name__ == "__main__":
    main()

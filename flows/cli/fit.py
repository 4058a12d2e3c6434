"""The command that says which stages of a recipe fit a machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Annotated, Any

import typer

from rlhf.flows.cli.shared import AsJson, RecipeName, Sets, app, out, print_json, usage_error
from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.worker import interpreter

SECTIONS = ("sft", "distill", "preference", "reward", "rl.rollout", "rl.score", "rl.update", "evaluate")
GB = 10**9


@app.command()
def fit(
    recipe: RecipeName,
    on: Annotated[
        str,
        typer.Option("--on", help="cpu for this machine's devices, or a kind and a number: v5e-16, v5p-64, h100x8."),
    ] = "cpu",
    seconds: Annotated[int, typer.Option(min=1, help="Time for compiling; later peaks are left out.")] = 300,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Say for each stage whether its memory fits a machine, and which settings make room."""
    try:
        resolved = load_recipe(recipe, sets=sets)
    except FileNotFoundError as e:
        raise usage_error(str(e)) from e
    given = {name: resolved.settings(name) for name in ("data", *SECTIONS)}
    question = {
        "on": on,
        "source": resolved.base.source,
        "turns": 1 if resolved.environment is None else resolved.environment.turns,
        "sections": {
            name: settings.model_dump(mode="json") for name, settings in given.items() if settings is not None
        },
        "seconds": seconds,
    }
    # Errors and progress are the process's own; libraries log much.
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    command = interpreter.command("rlhf.stages.tools.fit")
    done = subprocess.run(command, input=json.dumps(question), stdout=subprocess.PIPE, text=True, env=quiet)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode not in (0, -signal.SIGALRM) or not lines:
        raise typer.Exit(max(1, done.returncode))
    answer = json.loads(lines[-1])
    for stage in answer["stages"]:
        if stage["verdict"] == "unknown" and not stage["why"]:
            stage["why"] = f"the peak is not computed within {seconds} s; raise --seconds"
    if as_json:
        print_json(answer)
        return
    _show(answer)
    if resolved.rl is not None and (kind := resolved.rl.rollout.engine.kind) != "native":
        out.print(f"rollout: sampled by {kind} servers, whose memory is not counted")


def _show(answer: dict[str, Any]) -> None:
    machine = answer["machine"]
    limit = f"{machine['limit'] / GB:.1f} GB can be used of each"
    lines = [f"{machine['devices']} x {machine['kind']}, {limit}; prompts of {answer['prompt']} tokens"]
    for stage in answer["stages"]:
        parts = ", ".join(f"{name} {size / GB:.2f}" for name, size in stage["parts"].items())
        divided = ", ".join(f"{size} {name.replace('_', ' ')}" for name, size in stage["shape"].items())
        lines += [f"{stage['stage']}: {_memory(stage)}", f"  {parts} GB; {divided}"]
        lines += [f"  {stage['why']}"] if stage["why"] else []
        lines += [f"  with --set {' --set '.join(tried['set'])}: {_memory(tried)}" for tried in stage["remedies"]]
    for line in lines:
        out.print(line)


def _memory(stage: dict[str, Any]) -> str:
    peak = "" if stage["peak"] is None else f", peak {stage['peak'] / GB:.2f} GB"
    return f"{stage['verdict']}, held {stage['held'] / GB:.2f} GB{peak}"

"""The command that says what fits where."""

from __future__ import annotations

import json
import subprocess
from typing import Annotated, Any

import typer

from flows.cli.shared import AsJson, RecipeName, Sets, group, out, print_table, usage_error
from flows.recipe.model import Recipe
from flows.recipe.reading import load_recipe
from stages.worker import interpreter

commands = group()

SECTIONS = ("sft", "distill", "preference", "reward", "rl.rollout", "rl.score", "rl.update", "evaluate")
GB = 10**9


@commands.command()
def fit(
    recipe: RecipeName,
    on: Annotated[
        str,
        typer.Option("--on", help="cpu for this machine's devices, or a kind and a number: v5e-16, v5p-64, h100x8."),
    ] = "cpu",
    model: Annotated[
        str | None,
        typer.Option(help="A public model in place of the recipe's (llama-3-8b, qwen3-32b, ...), or a folder."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a prompt; 0: data.max_prompt_tokens.")] = 0,
    completion_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of a completion; 0: as the data and the sections limit it.")
    ] = 0,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Say for each stage whether it fits a machine: memory, work, time at best, and what would help."""
    try:
        resolved = load_recipe(recipe, sets=sets)
    except FileNotFoundError as e:
        raise usage_error(str(e)) from e
    question = {
        "on": on,
        "model": model,
        "source": resolved.base.source,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "turns": 1 if resolved.environment is None else resolved.environment.turns,
        "sections": _sections(resolved),
    }
    command = interpreter.command("stages.tools.fit")
    done = subprocess.run(command, input=json.dumps(question), capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        raise usage_error(lines[-1].removeprefix("error: "))
    # Libraries may write lines of their own before it.
    last = done.stdout.strip().splitlines()[-1]
    if as_json:
        typer.echo(last)
    else:
        _show(json.loads(last))
        if resolved.rl is not None and (kind := resolved.rl.rollout.engine.kind) != "native":
            out.print(f"rollout: sampled by {kind} servers, whose memory and time are not counted")


def _sections(recipe: Recipe) -> dict[str, Any]:
    found = {"data": recipe.data.model_dump(mode="json")}
    for name in SECTIONS:
        settings = recipe.settings(name)
        if settings is not None:
            found[name] = settings.model_dump(mode="json")
    return found


def _show(answer: dict[str, Any]) -> None:
    machine, lengths, size = answer["machine"], answer["lengths"], answer["model"]["parameters"]
    shown = f"{size / 1e9:.2f} B" if size >= 1e8 else f"{size / 1e6:.2f} M"
    out.print(
        f"{shown} parameters on {machine['devices']} x {machine['kind']}: "
        f"{machine['limit'] / GB:.1f} of {machine['memory'] / GB:.1f} GB a device can be used; "
        f"prompts of {_prompts(lengths)}"
    )
    rows = []
    for stage in answer["stages"]:
        low, middle, high = (p / GB for p in stage["peak"])
        held, peak = sum(stage["parts"].values()) / GB, f"{middle:.2f} ({low:.2f} to {high:.2f})"
        at_best = f"{_seconds(stage['step_seconds'])} a {stage['step']}"
        shape = _divided(stage["shape"])
        rows.append((stage["stage"], f"{held:.2f}", peak, shape, at_best, stage["bound"], stage["verdict"]))
    print_table(("stage", "held GB", "peak GB", "divided", "at best", "bound by", "verdict"), rows)
    for stage in answer["stages"]:
        parts = ", ".join(f"{name} {size / GB:.2f}" for name, size in stage["parts"].items() if size >= 0.005 * GB)
        rest = (f"{n / 1e12:.3g} {unit}" for n, unit in ((stage["flops"], "TFLOP"), (stage["moved"], "TB moved")))
        out.print(
            f"{stage['stage']}: completions of {stage['completion']} tokens; {parts or 'under 0.005'} GB; "
            f"{', '.join(rest)}"
        )
    for stage in (s for s in answer["stages"] if s["verdict"] != "fits"):
        for tried in stage.get("remedies", []):
            what = f"--on {tried['on']}" if "on" in tried else " ".join(f"--set {s}" for s in tried["set"])
            out.print(
                f"{stage['stage']} with {what}: peak {tried['peak'][1] / GB:.2f} GB "
                f"(up to {tried['peak'][2] / GB:.2f}), {tried['verdict']}"
            )
    if machine["name"] == "cpu":
        out.print("times go by rates that were measured now: other work on this machine makes them longer")
    out.print(_verdict(answer))


def _prompts(lengths: dict[str, int]) -> str:
    found, wanted = lengths["prompt"], lengths["wanted"]
    if found == wanted:
        return f"{found} tokens"
    return f"{found} tokens ({wanted} are allowed, and half of the model's {lengths['positions']} positions counted)"


def _divided(shape: dict[str, Any]) -> str:
    if "slots" in shape:
        what = "sequences" if shape["cache"] == "paged" else "slots"
        where = " in pages" if shape["cache"] == "paged" else ""
        return f"{shape['slots']} {what} of {shape['capacity']}{where}"
    return f"{shape['micro_batches']} x {shape['rows']} rows of {shape['row_tokens']}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _verdict(answer: dict[str, Any]) -> str:
    wrong = [s for s in answer["stages"] if s["verdict"] == "does not fit"]
    tight = [s["stage"] for s in answer["stages"] if s["verdict"] == "tight"]
    where = answer["machine"]["name"]
    if not wrong and not tight:
        return f"fits {where}"
    if not wrong:
        return f"tight on {where}: {', '.join(tight)} may need more than there is"
    limit = answer["machine"]["limit"]
    missing = (f"{s['stage']} lacks {(s['peak'][1] - limit) / GB:.1f} GB a device" for s in wrong)
    return f"does not fit {where}: {', '.join(missing)}"

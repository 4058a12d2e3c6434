"""The command line: `rlhf`. Nothing here loads JAX; what needs it runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from flows.recipe.model import RecipeError
from flows.recipe.reading import load_recipe
from flows.records import UnknownRun, all_runs, find_run, status_of
from stages.store.artifacts import Artifact, Store
from stages.worker.client import worker_environment

app = typer.Typer(
    help="Post-training as explicit, cached, resumable stages: data, SFT, reward model, RL rounds, evaluation, export.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A built-in recipe's name or the path of a YAML file.")
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Set one field of the recipe; repeatable.")
]
StoreUrl = Annotated[str, typer.Option("--store", help="Folder or fsspec URL of the artifacts.")]
RunName = Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run's name; the newest if left out.")]
NoPrefect = Annotated[bool, typer.Option("--no-prefect", help="Run the stages without Prefect: no server, no UI.")]


def usage_error(message: str) -> typer.Exit:
    """Prints one clear error; exit code 2."""
    err.print(f"error: {message}", markup=False, soft_wrap=True)
    return typer.Exit(2)


def read_recipe(name: str, sets: list[str] | None) -> Any:
    try:
        recipe = load_recipe(name, sets=sets)
        _check_sources(recipe)
        return recipe
    except (RecipeError, FileNotFoundError) as e:
        raise usage_error(str(e)) from e


def _check_sources(recipe: Any) -> None:
    """What the first stages read must be there before any work starts: models, data, reward functions, the judge."""
    from flows.graph.build import build, key_parts
    from stages.contract.registry import stage

    for node in build(recipe):
        if not node.inputs:
            try:
                key_parts(node, {})
            except FileNotFoundError as e:
                field = "distill.teacher" if node.name == "teacher" else "base.source"
                raise RecipeError(str(e).replace("base.source", field, 1)) from e
    try:
        stage("prepare").sources(recipe.data)
    except (ValueError, OSError) as e:
        raise RecipeError(f"data.source: {e}") from e
    try:
        if recipe.rl is not None:
            stage("score").sources(recipe.rl.score)
        if recipe.evaluate is not None:
            stage("evaluate").sources(recipe.evaluate)
    except ValueError as e:
        raise RecipeError(str(e)) from e


def _go(recipe: Any, no_prefect: bool, **options: Any) -> None:
    from flows.running.plain import run_plain, run_with_prefect
    from stages.worker.client import StageFailed, WorkerDied

    try:
        (run_plain if no_prefect else run_with_prefect)(recipe, **options)
    except (FileExistsError, RecipeError) as e:
        raise usage_error(str(e)) from e
    except (StageFailed, WorkerDied) as e:
        err.print(f"failed: {e}", markup=False, soft_wrap=True)
        err.print("what is finished is kept; the same command goes on from there", markup=False)
        raise typer.Exit(1) from e
    except KeyboardInterrupt as e:
        err.print("interrupted; what is finished is kept, the same command goes on from there", markup=False)
        raise typer.Exit(130) from e


@app.command()
def run(
    recipe: RecipeName,
    sets: Sets = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; two words are chosen if left out.")] = None,
    force: Annotated[
        list[str] | None, typer.Option(help="Make this stage or node again although it is cached.")
    ] = None,
    no_prefect: NoPrefect = False,
) -> None:
    """Run a recipe. Stages whose inputs, settings and code did not change are taken from the store."""
    resolved = read_recipe(recipe, sets)
    _go(resolved, no_prefect, name=name, force=_nodes(resolved, force) if force else None)


def _nodes(recipe: Any, names: list[str]) -> set[str]:
    from flows.graph.build import build, select

    try:
        return select({n.name: n for n in build(recipe)}, names)
    except ValueError as e:
        raise usage_error(str(e)) from e


@app.command()
def plan(recipe: RecipeName, sets: Sets = None) -> None:
    """Show hit or miss for each stage, and for a miss what changed. Runs nothing."""
    from flows.graph.plan import plan as make_plan

    resolved = read_recipe(recipe, sets)
    found = make_plan(resolved)
    folded: dict[str, list[Any]] = {}
    for p in found:
        folded.setdefault(_fold(p), []).append(p)
    for label, group in folded.items():
        first = group[0]
        count = f" ({len(group)} nodes)" if len(group) > 1 else ""
        out.print(f"{first.state:<6} {label.split('|')[0]}{count}", markup=False)
        if first.state == "miss":
            for reason in first.reasons:
                out.print(f"         {reason}", markup=False, soft_wrap=True)
    counts = {s: sum(p.state == s for p in found) for s in ("hit", "miss", "waits")}
    known = [p.seconds for p in found if p.state != "hit" and p.seconds is not None]
    guess = f"; about {sum(known):.0f} s by the last times" if known else ""
    out.print(f"{counts['hit']} hit, {counts['miss']} miss, {counts['waits']} wait for a miss before them{guess}")
    if counts["waits"]:
        out.print("A stage that waits reruns if its input comes out different; an equal output stops the rerun there.")


def _fold(planned: Any) -> str:
    name = planned.node.name
    if name.startswith("round-") and planned.state != "miss":
        return f"rounds: rollout, score, update|{planned.state}"
    return f"{name}|{planned.state}"


@app.command()
def rerun(
    run_name: RunName = None,
    stage: Annotated[list[str] | None, typer.Option("--stage", help="Stage or node to make again; repeatable.")] = None,
    store: StoreUrl = ".rlhf",
    no_prefect: NoPrefect = False,
) -> None:
    """Make one stage of a run again, and that stage alone."""
    from flows.graph.build import build, with_inputs
    from flows.recipe.model import Recipe

    record = _record(store, run_name)
    recipe = Recipe.model_validate_json(json.dumps(record["recipe"]))
    if not stage:
        raise usage_error(f"--stage is missing; stages are {', '.join(dict.fromkeys(n.stage for n in build(recipe)))}")
    # The record may have been written where the store had another address.
    recipe = recipe.model_copy(update={"store": store})
    chosen = _nodes(recipe, stage)
    needed = with_inputs({n.name: n for n in build(recipe)}, chosen)
    before = {n: e.get("digest") for n, e in record["nodes"].items()}
    _go(recipe, no_prefect, force=chosen, only=needed)
    after = find_run(Store(store), None)
    changed = [n for n in chosen if before.get(n) not in (None, after["nodes"][n]["digest"])]
    if changed:
        out.print(
            f"{', '.join(sorted(changed))}: the output differs; `rlhf run` makes what follows again", markup=False
        )
    else:
        out.print("the output is the same as before; nothing that follows needs to be made again", markup=False)


@app.command()
def rescore(
    run_name: RunName = None,
    reward: Annotated[
        list[str] | None, typer.Option("--reward", help="FUNCTION or NAME=FUNCTION, in place of all; repeatable.")
    ] = None,
    sets: Sets = None,
    name: Annotated[str | None, typer.Option(help="Name of the new run.")] = None,
    store: StoreUrl = ".rlhf",
    no_prefect: NoPrefect = False,
) -> None:
    """Score a run's rollouts by other rewards and train on them again. No rollouts are sampled."""
    from flows.recipe.rescore import rescored

    record = _record(store, run_name)
    try:
        recipe = rescored(record, reward or [], sets or [], store)
        _check_sources(recipe)
    except RecipeError as e:
        raise usage_error(str(e)) from e
    _go(recipe, no_prefect, name=name)


def _record(store: str, name: str | None, node: str | None = None) -> dict[str, Any]:
    """The named run, or the newest; with `node`, the newest in which that node is finished."""
    if name is None and node is not None:
        for record in reversed(all_runs(Store(store))):
            if "digest" in record["nodes"].get(node, {}):
                return record
    try:
        return find_run(Store(store), name)
    except UnknownRun as e:
        raise usage_error(str(e)) from e


@app.command()
def runs(store: StoreUrl = ".rlhf") -> None:
    """List the runs of a store."""
    table = Table(box=None)
    for column in ("run", "status", "started", "made", "cached", "RL score"):
        table.add_column(column)
    for record in all_runs(Store(store)):
        states = [e.get("state") for e in record["nodes"].values()]
        score = record["nodes"].get("evaluate.rl", {}).get("metrics", {}).get("score")
        shown = "" if score is None else f"{score:.3f}"
        cells = [record["name"], status_of(record), record["started"], states.count("made"), states.count("hit"), shown]
        table.add_row(*[str(c) for c in cells])
    out.print(table)


@app.command()
def show(run_name: RunName = None, store: StoreUrl = ".rlhf") -> None:
    """Show a run: each stage with its state, time, key and first figures."""
    from flows.report.console import headline

    record = _record(store, run_name)
    out.print(f"{record['name']}  {status_of(record)}  {record['started']}", markup=False)
    for name, e in record["nodes"].items():
        first = headline(e["stage"], e["metrics"]) if "metrics" in e else e.get("error", "")
        seconds = f"{e.get('seconds', 0):.1f} s"
        out.print(f"  {name:<20} {e['state']:<7} {seconds:>8}  {e['key'][:12]}  {first}", markup=False, soft_wrap=True)
    place = Store(store)
    out.print(f"report  {place.join('runs', record['name'], 'report.html')}", markup=False, soft_wrap=True)
    out.print(f"log     {place.scratch / 'runs' / record['name'] / 'worker.log'}", markup=False, soft_wrap=True)


def _artifact(store: Store, record: dict[str, Any], node: str) -> Artifact:
    entry = record["nodes"].get(node)
    if entry is None or "digest" not in entry:
        raise usage_error(f"run {record['name']} has no finished {node}; finished are {', '.join(record['nodes'])}")
    artifact = store.get(entry["stage"], entry["key"])
    if artifact is None:
        raise usage_error(f"{node} of {record['name']} is gone from {store.url}; `rlhf run` makes it again")
    return artifact


def _become(command: list[str]) -> None:
    """Runs a program in place of this one: a signal to it reaches whoever computes, and nobody is left behind."""
    sys.stdout.flush()
    os.execve(command[0], command, worker_environment())


@app.command()
def chat(
    run_name: RunName = None,
    store: StoreUrl = ".rlhf",
    node: Annotated[str, typer.Option(help="Which policy: export, sft, base or round-003.update.")] = "export",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
) -> None:
    """Talk to the policy of a run."""
    place = Store(store)
    record = _record(store, run_name, node)
    artifact = _artifact(place, record, node)
    command = [sys.executable, "-m", "stages.serving.chat", store, artifact.stage, artifact.key]
    command += [
        "--base",
        record["nodes"]["base"]["key"],
        "--temperature",
        str(temperature),
        "--max-tokens",
        str(max_tokens),
    ]
    system = record["recipe"]["data"].get("system_prompt")
    command += ["--system", system] if system else []
    _become(command)


@app.command()
def serve(
    run_name: RunName = None,
    store: StoreUrl = ".rlhf",
    node: Annotated[str, typer.Option(help="Which policy: export, sft, base or round-003.update.")] = "export",
    host: Annotated[str, typer.Option(help="Address to listen at; the default is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    context: Annotated[int, typer.Option(min=0, help="Longest prompt with its answer in tokens; 0: 4,096.")] = 0,
    slots: Annotated[int, typer.Option(min=0, help="Answers made side by side; 0: the device decides.")] = 0,
    quantization: Annotated[Literal["none", "int8"], typer.Option(help="Of the weight matrices of layers.")] = "none",
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "int8"], typer.Option(help="Keys and values; auto: as computed.")
    ] = "auto",
) -> None:
    """Serve the policy of a run as an OpenAI-compatible endpoint (chat and completions, streaming, logprobs)."""
    record = _record(store, run_name, node)
    artifact = _artifact(Store(store), record, node)
    command = [sys.executable, "-m", "stages.serving.server", store, artifact.stage, artifact.key]
    command += ["--base", record["nodes"]["base"]["key"], "--name", f"{record['name']}:{node}", "--host", host]
    command += ["--port", str(port), "--context", str(context), "--slots", str(slots)]
    command += ["--quantization", quantization, "--kv-cache-dtype", kv_cache_dtype]
    _become(command)


@app.command()
def export(
    run_name: RunName = None,
    store: StoreUrl = ".rlhf",
    to: Annotated[str | None, typer.Option(help="Copy the folder here.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check that transformers (torch) gives equal logits.")
    ] = False,
) -> None:
    """Show, copy or verify a run's exported Hugging Face folder."""
    import shutil
    from pathlib import Path

    artifact = _artifact(Store(store), _record(store, run_name, "export"), "export")
    folder = artifact.local()
    if to is not None:
        target = Path(to)
        if target.exists() and any(target.iterdir()):
            raise usage_error(f"{to} exists and is not empty")
        shutil.copytree(folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json", "logs"))
        folder = target
    out.print(str(folder), markup=False, soft_wrap=True)
    if verify:
        fault = Store(store).verify(artifact)
        if fault:
            err.print(f"failed: {fault}", markup=False)
            raise typer.Exit(1)
        raise typer.Exit(subprocess.call([sys.executable, "-m", "stages.tools.verify_export", str(folder)]))


@app.command()
def verify(store: StoreUrl = ".rlhf") -> None:
    """Check the checksums of every artifact in a store; set damaged ones aside."""
    place = Store(store)
    bad = count = 0
    for stage, key in place.all_keys():
        count += 1
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            artifact = place.get(stage, key)
        fault = place.verify(artifact) if artifact is not None else None
        if artifact is None:
            bad += 1
            out.print(f"damaged: {told[-1].message if told else key}", markup=False, soft_wrap=True)
        elif fault:
            bad += 1
            aside = place.set_aside(stage, key)
            out.print(f"damaged: {artifact.url}: {fault}; moved to {aside}", markup=False, soft_wrap=True)
    out.print(f"{count} artifacts, {bad} damaged" + ("; the next run makes them again" if bad else ""))
    raise typer.Exit(1 if bad else 0)


@app.command()
def report(run_name: RunName = None, store: StoreUrl = ".rlhf") -> None:
    """Write a run's HTML report again and print where it is."""
    from flows.report.page import write_report

    out.print(write_report(Store(store), _record(store, run_name)["name"]), markup=False, soft_wrap=True)


@app.command()
def doctor() -> None:
    """Show the device, what it decides for a recipe, and the versions in use."""
    raise typer.Exit(subprocess.call([sys.executable, "-m", "stages.tools.doctor"]))


def main() -> None:
    """Entry point of the console script."""
    # `module:function` may lie in the current folder, as the worker (`python -m`) sees it.
    sys.path.append(os.getcwd())
    app()


if __name__ == "__main__":
    main()

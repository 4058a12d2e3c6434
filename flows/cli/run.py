"""Commands that run a recipe or plan a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.shared import NoPrefect, RecipeName, RunName, Sets, StoreUrl, group, out, record_of, usage_error
from flows.recipe.model import Recipe, RecipeError
from flows.recipe.reading import checked, load_recipe
from flows.records import find_run
from stages.store.artifacts import Store

if TYPE_CHECKING:
    from flows.graph.build import Node
    from flows.graph.plan import Planned

commands = group()

RunTitle = Annotated[str | None, typer.Option("--name", help="Name of the run; two words are chosen if left out.")]


@commands.command()
def run(
    recipe: RecipeName,
    sets: Sets = None,
    name: RunTitle = None,
    force: Annotated[
        list[str] | None, typer.Option(help="Make this stage or node again although it is cached.")
    ] = None,
    no_prefect: NoPrefect = False,
) -> None:
    """Run a recipe. Stages whose inputs, settings and code did not change are taken from the store."""
    from flows.cli.launch import launch

    resolved = read_recipe(recipe, sets)
    launch(resolved, no_prefect, name=name, force=_nodes(resolved, force) if force else None)


@commands.command()
def plan(
    recipe: RecipeName,
    sets: Sets = None,
    config: Annotated[
        bool, typer.Option("--config", help="Print the recipe with all defaults and presets filled in, as YAML.")
    ] = False,
) -> None:
    """Show hit or miss for each stage, and for a miss what changed. Runs nothing."""
    from flows.graph.plan import plan as make_plan

    resolved = read_recipe(recipe, sets)
    if config:
        import yaml

        values = resolved.model_dump(mode="json")
        typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120), nl=False)
        return
    planned = make_plan(resolved)
    for label, nodes in _folded(planned):
        first = nodes[0]
        count = f" ({len(nodes)} nodes)" if len(nodes) > 1 else ""
        out.print(f"{first.state:<6} {label}{count}", markup=False)
        for reason in first.reasons if first.state == "miss" else ():
            out.print(f"         {reason}", markup=False, soft_wrap=True)
    counts = {s: sum(p.state == s for p in planned) for s in ("hit", "miss", "waits")}
    # Nodes that were never made have no time to go by.
    known = [p.seconds for p in planned if p.state != "hit" and p.seconds is not None]
    guess = f"; about {sum(known):.0f} s by the last times" if known else ""
    out.print(f"{counts['hit']} hit, {counts['miss']} miss, {counts['waits']} wait for a miss before them{guess}")
    if counts["waits"]:
        out.print("A stage that waits reruns if its input comes out different; an equal output stops the rerun there.")


@commands.command()
def rerun(
    store: StoreUrl,
    run_name: RunName = None,
    stage: Annotated[list[str] | None, typer.Option("--stage", help="Stage or node to make again; repeatable.")] = None,
    no_prefect: NoPrefect = False,
) -> None:
    """Make one stage of a run again, and that stage alone."""
    from flows.cli.launch import launch
    from flows.graph.build import build, with_inputs

    record = record_of(store, run_name)
    # The record has the address that the store had when the run was made; it may have moved since.
    try:
        recipe = checked(record["recipe"], Path(f"run {record['name']}"), None, set()).model_copy(
            update={"store": store}
        )
    except RecipeError as e:
        raise usage_error(str(e)) from e
    nodes = {n.name: n for n in build(recipe)}
    if not stage:
        stages = dict.fromkeys(n.stage for n in nodes.values())
        raise usage_error(f"--stage is missing; stages are {', '.join(stages)}")
    chosen = _nodes(recipe, stage)
    before = {n: e.get("digest") for n, e in record["nodes"].items()}
    # Inputs come from the store; only the chosen nodes are made again.
    launch(recipe, no_prefect, force=chosen, only=with_inputs(nodes, chosen))
    # The newest run is the one that `launch` has just ended.
    after = find_run(Store(store), None)
    changed = [n for n in chosen if before.get(n) not in (None, after["nodes"][n]["digest"])]
    if changed:
        out.print(
            f"{', '.join(sorted(changed))}: the output differs; `rlhf run` makes what follows again", markup=False
        )
    else:
        out.print("the output is the same as before; nothing that follows needs to be made again", markup=False)


@commands.command()
def rescore(
    store: StoreUrl,
    run_name: RunName = None,
    reward: Annotated[
        list[str] | None, typer.Option("--reward", help="FUNCTION or NAME=FUNCTION, in place of all; repeatable.")
    ] = None,
    sets: Sets = None,
    name: RunTitle = None,
    no_prefect: NoPrefect = False,
) -> None:
    """Score a run's rollouts by other rewards and train on them again. No rollouts are sampled."""
    from flows.cli.launch import launch
    from flows.recipe.rescore import rescored

    record = record_of(store, run_name)
    try:
        recipe = rescored(record, reward or [], sets or [], store)
        _check_sources(recipe)
    except RecipeError as e:
        raise usage_error(str(e)) from e
    launch(recipe, no_prefect, name=name)


def read_recipe(name: str, sets: list[str] | None) -> Recipe:
    """The recipe with its `--set` options, checked as far as that works without running it; else a usage error."""
    try:
        recipe = load_recipe(name, sets=sets)
        _check_sources(recipe)
        return recipe
    except (RecipeError, FileNotFoundError) as e:
        raise usage_error(str(e)) from e


def _check_sources(recipe: Recipe) -> None:
    """Raises RecipeError for a model, data, a reward function, a judge or an algorithm that is not there.

    A run would find out when it comes to that stage, after minutes or hours of work.
    """
    from flows.graph.build import build
    from stages.contract.registry import stage

    # Nodes of one stage in several rounds have the same sources; each base model has its own.
    nodes: dict[str, Node] = {}
    for node in build(recipe):
        nodes.setdefault(node.stage if node.inputs else node.name, node)
    for node in nodes.values():
        try:
            stage(node.stage).sources(node.config)
        except (ValueError, OSError) as e:
            message = str(e)
            if node.name == "teacher":
                message = message.replace("base.source", "distill.teacher", 1)
            elif node.stage == "prepare":
                message = f"data.source: {message}"
            raise RecipeError(message) from e


def _nodes(recipe: Recipe, names: list[str]) -> set[str]:
    """Names of nodes, from names of nodes or stages; a usage error for an unknown one."""
    from flows.graph.build import build, select

    try:
        return select({n.name: n for n in build(recipe)}, names)
    except ValueError as e:
        raise usage_error(str(e)) from e


def _folded(planned: list[Planned]) -> list[tuple[str, list[Planned]]]:
    """The plan by label. Rounds that are no miss share one label: there may be hundreds, with nothing to explain."""
    folded: dict[tuple[str, str], list[Planned]] = {}
    for p in planned:
        in_round = p.node.name.startswith("round-") and p.state != "miss"
        label = "rounds: rollout, score, update" if in_round else p.node.name
        folded.setdefault((label, p.state), []).append(p)
    return [(label, nodes) for (label, _), nodes in folded.items()]

"""Commands that run a recipe or plan a run."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.flows.cli.checks import check, read_recipe
from rlhf.flows.cli.shared import (
    AsJson,
    NoPrefect,
    RecipeName,
    RunName,
    Sets,
    StoreUrl,
    group,
    out,
    print_json,
    record_of,
    usage_error,
)
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.reading import checked
from rlhf.flows.records import candidates, find_run, finished_nodes
from rlhf.stages.store.artifacts import Store

if TYPE_CHECKING:
    from rlhf.flows.graph.plan import Planned

commands = group()

RunTitle = Annotated[str | None, typer.Option("--name", help="Name of the run; two words are chosen if left out.")]

OwnStore = Annotated[
    str | None, typer.Option("--store", help="Folder or fsspec URL of the artifacts; the recipe's if left out.")
]


OnCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="ADDRESS", help="Ray cluster of the roles, HOST:PORT or auto; the recipe's if left out."
    ),
]


def _with(sets: list[str] | None, store: str | None, cluster: str | None) -> list[str]:
    given = {"store": store, "workers.cluster": cluster}
    # As a text of YAML, which `--set` reads: a path may hold what YAML takes for a comment or a mapping.
    texts = {field: json.dumps(value, ensure_ascii=False) for field, value in given.items() if value is not None}
    return [*(sets or []), *(f"{field}={text}" for field, text in texts.items())]


@commands.command()
def run(
    recipe: RecipeName,
    sets: Sets = None,
    store: OwnStore = None,
    cluster: OnCluster = None,
    name: RunTitle = None,
    force: Annotated[
        list[str] | None, typer.Option(help="Make this stage or node again although it is cached.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE[,...]", help="Make these stages or nodes alone, with what they need before them; repeatable."
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="STAGE", help="Stop behind this stage or node; the same command goes on.")
    ] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Where the run of this --name is at work elsewhere, wait until that has ended."),
    ] = False,
    no_prefect: NoPrefect = False,
) -> None:
    """Run a recipe. Stages whose inputs, settings and code did not change are taken from the store."""
    from rlhf.flows.cli.launch import launch

    if wait and name is None:
        raise usage_error("--wait is for the run of a --name; say which")
    resolved = read_recipe(recipe, _with(sets, store, cluster))
    part = _part(resolved, only, until)
    forced = _nodes(resolved, force) if force else None
    launch(resolved, no_prefect, name=name, force=forced, only=part, wait=wait)


def _part(recipe: Recipe, only: list[str] | None, last: str | None) -> set[str] | None:
    """The nodes that `--only` and `--until` leave; None where neither is given."""
    from rlhf.flows.graph.build import nodes_of, until, with_inputs

    if only and last is not None:
        raise usage_error("say --only or --until, not both")
    nodes = {n.name: n for n in nodes_of(recipe)}
    if last is not None:
        return until(nodes, _nodes(recipe, [last]))
    names = [name for text in only or () for name in text.split(",")]
    return with_inputs(nodes, _nodes(recipe, names)) if names else None


@commands.command()
def plan(
    recipe: RecipeName,
    sets: Sets = None,
    store: OwnStore = None,
    cluster: OnCluster = None,
    config: Annotated[
        bool, typer.Option("--config", help="Print the recipe with all defaults and presets filled in, as YAML.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show hit or miss for each stage, and for a miss what changed. Runs nothing."""
    from rlhf.flows.graph.plan import plan as make_plan
    from rlhf.flows.running.recipe_warnings import of_data
    from rlhf.stages.prepare.dropped_records import rows_by_source

    resolved = read_recipe(recipe, _with(sets, store, cluster))
    if config:
        import yaml

        values = resolved.model_dump(mode="json")
        typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120), nl=False)
        return
    planned = make_plan(resolved)
    data = [p.metrics for p in planned if p.node.stage == "prepare"]
    sources = [source for metrics in data for source in metrics.get("sources", ())]
    remarks = [line for metrics in data for line in of_data(resolved, metrics)]
    counts = {s: sum(p.state == s for p in planned) for s in ("hit", "miss", "waits")}
    known, untimed = _expected(planned)
    if as_json:
        about: dict[str, Any] = {"recipe": resolved.name, "store": Store(resolved.store).shown, "counts": counts}
        about |= {"seconds": sum(known) if known else None, "untimed": untimed, "remarks": remarks}
        about["sources"] = sources
        print_json(about | {"nodes": [_as_json(p) for p in planned]})
        return
    for label, nodes in _folded(planned):
        first = nodes[0]
        count = f" ({len(nodes)} nodes)" if len(nodes) > 1 else ""
        nearest = next((p.nearest for p in nodes if p.nearest), "")
        against = f"  (nearest: run {nearest})" if nearest else ""
        out.print(f"{first.state:<6} {label}{count}{against}")
        for reason in first.reasons if first.state == "miss" else ():
            out.print(f"         {reason}")
    for line in rows_by_source(sources) if sources else ():
        out.print(f"  {line}")
    for line in remarks:
        out.print(f"! {line}")
    more = f" and {untimed} stages of kinds that were never made" if untimed else ""
    guess = f"; {sum(known):.0f} s by the times of such stages, without starts{more}" if known else ""
    total = f"{counts['hit']} hit, {counts['miss']} miss, {counts['waits']} wait for a miss before them{guess}"
    out.print(total)
    if counts["waits"]:
        out.print("A waiting stage runs again only if its inputs, settings or code have changed.")


def _expected(planned: list[Planned]) -> tuple[list[float], int]:
    """The expected seconds of each node that is no hit, and the number of those that nothing is known of: a node that
    was never made, such as of a further round, takes the mean of its stage."""
    times: dict[str, list[float]] = {}
    for p in planned:
        if p.seconds is not None:
            times.setdefault(p.node.stage, []).append(p.seconds)
    todo = [p for p in planned if p.state != "hit"]
    found = [p.seconds if p.seconds is not None else fmean(times[p.node.stage]) for p in todo if p.node.stage in times]
    return found, len(todo) - len(found)


def _as_json(planned: Planned) -> dict[str, Any]:
    """The plan of a stage, as `--json` has it."""
    return {
        "node": planned.node.name,
        "stage": planned.node.stage,
        "state": planned.state,
        "reasons": planned.reasons,
        "nearest": planned.nearest or None,
        "seconds": planned.seconds,
    }


@commands.command()
def rerun(
    store: StoreUrl,
    run_name: RunName = None,
    stage: Annotated[list[str] | None, typer.Option("--stage", help="Stage or node to make again; repeatable.")] = None,
    no_prefect: NoPrefect = False,
) -> None:
    """Recompute stages of a run, with what they need and the store lacks; nothing that follows them."""
    from rlhf.flows.cli.launch import launch
    from rlhf.flows.graph.build import build, select, with_inputs
    from rlhf.flows.graph.policy_refs import recorded
    from rlhf.flows.running.naming import free_name

    record = record_of(store, run_name)
    # The record has the address that the store had when the run was made; it may have moved since.
    found = checked(record["recipe"], Path(f"run {record['name']}"))
    recipe = found.model_copy(update={"store": store})
    standing = recorded(record)
    nodes = {n.name: n for n in build(recipe, standing)}
    if not stage:
        stages = dict.fromkeys(n.stage for n in nodes.values())
        raise usage_error(f"--stage is missing; stages are {', '.join(stages)}")
    chosen = select(nodes, stage)
    before = {n: e.get("digest") for n, e in record["nodes"].items()}
    # Inputs come from the store; only the chosen nodes are made again.
    name = free_name(Store(store), recipe.name)
    launch(recipe, no_prefect, name=name, force=chosen, only=with_inputs(nodes, chosen), standing=standing)
    after = find_run(Store(store), name)
    changed = sorted(n for n in chosen if before.get(n) not in (None, after["nodes"][n]["digest"]))
    new = sorted(n for n in chosen if before.get(n) is None)
    if new:
        out.print(f"{', '.join(new)}: computed for the first time; `rlhf run` computes what follows")
    if changed:
        out.print(f"{', '.join(changed)}: the output differs; `rlhf run` makes what follows again")
    elif not new:
        out.print("the output is the same as before; nothing that follows needs to be made again")


@commands.command()
def rescore(
    store: StoreUrl,
    run_name: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run or a recipe; the newest with the rollouts of all rounds."),
    ] = None,
    reward: Annotated[
        list[str] | None, typer.Option("--reward", help="FUNCTION or NAME=FUNCTION, in place of all; repeatable.")
    ] = None,
    sets: Sets = None,
    name: RunTitle = None,
    no_prefect: NoPrefect = False,
) -> None:
    """Score a run's rollouts by other rewards and train on them again. No rollouts are sampled.

    The policies drift from those that sampled: unless --set says otherwise, rl.update.max_mismatch_kl is at least 1.0,
    short_of_groups is train, and old_logps is trainer.
    """
    from rlhf.flows.cli.launch import launch
    from rlhf.flows.recipe.rescore import rescored

    try:
        record = _sampled(store, run_name)
        recipe = rescored(record, reward or [], sets or [], store)
        check(recipe)
    except RecipeError as e:
        raise usage_error(str(e)) from e
    launch(recipe, no_prefect, name=name)


def _sampled(store: str, run_name: str | None) -> dict[str, Any]:
    """The run that the name stands for, of several the newest that has the rollouts of all its rounds.

    Raises RecipeError where none has.
    """
    found = candidates(Store(store), run_name)
    if len(found) == 1 and run_name is not None:
        return found[0]
    for record in found:
        rl = record["recipe"].get("rl")
        if rl and all(f"round-{i:03d}.rollout" in finished_nodes(record) for i in range(rl["rounds"])):
            out.print(f"rollouts of run {record['name']}")
            return record
    raise RecipeError(f"no run in {store} has the rollouts of all its rounds; the newest is {found[0]['name']}")


def _nodes(recipe: Recipe, names: list[str]) -> set[str]:
    """Names of nodes, from names of nodes or stages. Raises RecipeError for an unknown one."""
    from rlhf.flows.graph.build import nodes_of, select

    return select({n.name: n for n in nodes_of(recipe)}, names)


def _folded(planned: list[Planned]) -> list[tuple[str, list[Planned]]]:
    """The plan by label. Rounds that are no miss share a line: there may be hundreds, with nothing to explain.

    A miss among them ends the line before it, so that each line says which rounds it is about.
    """
    folded: list[tuple[str, list[Planned]]] = []
    for p in planned:
        in_round = p.node.name.startswith("round-") and p.state != "miss"
        last = folded[-1][1][-1] if folded else None
        if in_round and last is not None and last.node.name.startswith("round-") and last.state == p.state:
            folded[-1][1].append(p)
        else:
            folded.append((p.node.name, [p]))
    return [(_rounds(nodes) if len(nodes) > 1 else name, nodes) for name, nodes in folded]


def _rounds(nodes: list[Planned]) -> str:
    """The rounds and stages of a folded line, such as `rounds 1 to 7: rollout, score, update`."""
    numbers = [int(p.node.name.removeprefix("round-").split(".")[0]) for p in nodes]
    rounds = f"round {numbers[0]}" if numbers[0] == numbers[-1] else f"rounds {numbers[0]} to {numbers[-1]}"
    return f"{rounds}: {', '.join(dict.fromkeys(p.node.stage for p in nodes))}"

"""Commands that plan or run a recipe, or parts of a run again."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    app,
    out,
    print_json,
    record_of,
    usage_error,
)
from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import checked, readable
from rlhf.flows.records import candidates, finished_nodes
from rlhf.stages.store.artifacts import Store

if TYPE_CHECKING:
    from rlhf.flows.graph.plan import Planned

MOST_REASONS = 20
"""Lines about a miss in `plan`."""
FEW_REASONS = 3
"""Lines of an earlier stage that are repeated."""

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


def with_options(sets: list[str] | None, store: str | None, cluster: str | None) -> list[str]:
    given = {"store": store, "workers.cluster": cluster}
    # Quoted, because `--set` reads YAML: a path may look like a comment or a mapping.
    texts = {field: json.dumps(value, ensure_ascii=False) for field, value in given.items() if value is not None}
    return [*(sets or []), *(f"{field}={text}" for field, text in texts.items())]


@app.command()
def run(
    recipe: RecipeName,
    sets: Sets = None,
    store: OwnStore = None,
    cluster: OnCluster = None,
    name: RunTitle = None,
    force: Annotated[list[str] | None, typer.Option(help="Recompute this stage or node although it is cached.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE[,...]", help="Run only these stages or nodes and their inputs; repeatable."),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="If the run of this --name is running elsewhere, wait for its end."),
    ] = False,
    no_prefect: NoPrefect = False,
) -> None:
    """Run a recipe. Stages with unchanged inputs, settings and code come from the store."""
    from rlhf.flows.cli.launch import launch
    from rlhf.flows.graph.build import nodes_of, select, with_inputs

    if wait and name is None:
        raise usage_error("--wait needs --name NAME, the run to wait for")
    resolved = read_recipe(recipe, with_options(sets, store, cluster))
    nodes = {n.name: n for n in nodes_of(resolved)}
    forced = select(nodes, force) if force else None
    part = with_inputs(nodes, select(nodes, ",".join(only).split(","))) if only else None
    launch(resolved, no_prefect, name=name, force=forced, only=part, wait=wait)


@app.command()
def plan(
    recipe: RecipeName,
    sets: Sets = None,
    store: OwnStore = None,
    cluster: OnCluster = None,
    config: Annotated[
        bool, typer.Option("--config", help="Print the recipe with all defaults and presets, as YAML.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show hit or miss for each stage, and for a miss what changed. Runs nothing."""
    from rlhf.flows.graph.plan import plan as make_plan
    from rlhf.flows.running.recipe_warnings import of_data
    from rlhf.stages.prepare.dropped_records import rows_by_source

    resolved = read_recipe(recipe, with_options(sets, store, cluster))
    if config:
        import yaml

        typer.echo(yaml.safe_dump(readable(resolved), sort_keys=False, allow_unicode=True, width=120), nl=False)
        return
    planned = make_plan(resolved)
    data = [p.metrics for p in planned if p.node.stage == "prepare"]
    sources = [source for metrics in data for source in metrics.get("sources", ())]
    remarks = [line for metrics in data for line in of_data(resolved, metrics)]
    counts = {s: sum(p.state == s for p in planned) for s in ("hit", "miss", "waits")}
    known, untimed = expected(planned)
    if as_json:
        about: dict[str, Any] = {"recipe": resolved.name, "store": Store(resolved.store).shown, "counts": counts}
        about |= {"seconds": sum(known) if known else None, "untimed": untimed, "remarks": remarks, "sources": sources}
        nodes = [
            {"node": p.node.name, "stage": p.node.stage, "nearest": p.nearest or None}
            | {key: getattr(p, key) for key in ("state", "reasons", "seconds")}
            for p in planned
        ]
        print_json(about | {"nodes": nodes})
        return
    seen: set[str] = set()
    for label, group in _folded(planned):
        count = f" ({len(group)} nodes)" if len(group) > 1 else ""
        nearest = next((f"  (nearest: run {p.nearest})" for p in group if p.nearest), "")
        out.print(f"{group[0].state:<6} {label}{count}{nearest}")
        for reason in _shortened(group[0].reasons, seen) if group[0].state == "miss" else ():
            out.print(f"         {reason}")
    rows = rows_by_source(sources) if sources else ()
    for line in [*(f"  {row}" for row in rows), *(f"! {remark}" for remark in remarks)]:
        out.print(line)
    waits = f"{counts['waits']} wait for an earlier miss{guess(known, untimed)}"
    out.print(f"{counts['hit']} hit, {counts['miss']} miss, {waits}")
    if (rl := resolved.rl) is not None:
        sampling = f" and {rl.rollout.programs} to decode" if rl.rollout.programs else ""
        out.print(f"On an accelerator the rounds compile at most {rl.update.programs} programs to train{sampling}.")
    if counts["waits"]:
        out.print("A waiting stage runs again only if its inputs, settings or code have changed.")


def _shortened(reasons: Sequence[str], seen: set[str]) -> list[str]:
    """Return the lines of `plan` about a miss; `seen` gathers those of earlier stages.

    After an upgrade many stages have many reasons, and most of them in common.
    """
    new = [reason for reason in reasons if reason not in seen]
    if len(reasons) - len(new) < FEW_REASONS:
        new = list(reasons)
    lines, common = new[:MOST_REASONS], len(reasons) - len(new)
    seen.update(lines)
    if common:
        lines.append(f"and {common} of the lines above")
    if len(new) > MOST_REASONS:
        lines.append(f"and {len(new) - MOST_REASONS} more lines: rlhf plan --json")
    return lines


def expected(planned: Sequence[Planned]) -> tuple[list[float], int]:
    """Return the expected seconds of the nodes to compute, and the number of those without an estimate.

    A new node, such as one of a further round, takes the mean of its stage.
    """
    times: dict[str, list[float]] = {}
    for p in planned:
        if p.seconds is not None:
            times.setdefault(p.node.stage, []).append(p.seconds)
    todo = [p for p in planned if p.state != "hit"]
    known = [p.seconds if p.seconds is not None else fmean(times[p.node.stage]) for p in todo if p.node.stage in times]
    return known, len(todo) - len(known)


def guess(known: list[float], untimed: int) -> str:
    """Return the end of a line with the expected time."""
    more = f" and {untimed} stages of kinds that were never computed" if untimed else ""
    return f"; about {sum(known):.0f} s by earlier times of such stages, without start-up{more}" if known else ""


@app.command()
def rerun(
    store: StoreUrl,
    run_name: RunName = None,
    stage: Annotated[list[str] | None, typer.Option("--stage", help="Stage or node to recompute; repeatable.")] = None,
    no_prefect: NoPrefect = False,
) -> None:
    """Recompute stages of a run, and missing inputs of theirs, but no later stages."""
    from rlhf.flows.cli.launch import recompute
    from rlhf.flows.graph.build import build, select
    from rlhf.flows.graph.policy_refs import recorded

    record = record_of(store, run_name)
    # The store may have moved since the run.
    recipe = checked(record["recipe"] | {"store": store}, Path(f"run {record['name']}"))
    standing = recorded(record)
    nodes = {n.name: n for n in build(recipe, standing)}
    if not stage:
        stages = dict.fromkeys(n.stage for n in nodes.values())
        raise usage_error(f"--stage is missing; use one of {', '.join(stages)}")
    chosen = select(nodes, stage)
    after = recompute(recipe, chosen, standing, no_prefect, force=chosen)["nodes"]
    before, now = ({n: run.get(n, {}).get("digest") for n in chosen} for run in (record["nodes"], after))
    # A gate may leave nodes out.
    changed = sorted(n for n in chosen if now[n] not in (None, before[n]))
    if changed:
        out.print(f"{', '.join(changed)}: new output; `rlhf run` recomputes later stages")
    elif not any(now.values()):
        out.print(f"the gate leaves {', '.join(chosen)} out")
    else:
        out.print("the output is the same as before; later stages need no recomputation")


@app.command()
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
    """Score a run's rollouts by other rewards, and train on them. Samples nothing.

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
    """Return the run of this name, or the newest one with the rollouts of all its rounds. Raises RecipeError."""
    found = candidates(Store(store), run_name)
    if len(found) == 1 and run_name is not None:
        return found[0]
    for record in found:
        rl = record["recipe"].get("rl")
        if rl and all(f"round-{i:03d}.rollout" in finished_nodes(record) for i in range(rl["rounds"])):
            out.print(f"rollouts of run {record['name']}")
            return record
    newest = found[0]["name"]
    raise RecipeError(f"no run in {store} has the rollouts of all its rounds; name a run, such as the newest: {newest}")


def _folded(planned: list[Planned]) -> list[tuple[str, list[Planned]]]:
    """Group the plan by label. Consecutive nodes of rounds share a line unless they are misses, which need reasons."""
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
    """Name the rounds and stages of a folded line, such as `rounds 1 to 7: rollout, score, update`."""
    numbers = [int(p.node.name.removeprefix("round-").split(".")[0]) for p in nodes]
    rounds = f"round {numbers[0]}" if numbers[0] == numbers[-1] else f"rounds {numbers[0]} to {numbers[-1]}"
    return f"{rounds}: {', '.join(dict.fromkeys(p.node.stage for p in nodes))}"

"""`rlhf sweep`: runs variants of a recipe and compares them."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.flows.cli.checks import check, read_recipe
from rlhf.flows.cli.run import OnCluster, OwnStore, expected, guess, with_options
from rlhf.flows.cli.shared import NoPrefect, RecipeName, Sets, app, err, interrupt_at_sigterm, out, print_table
from rlhf.flows.graph.build import with_inputs
from rlhf.flows.recipe.model import RecipeError, policies_of
from rlhf.flows.records import SWEEP, SWEEPS, WHOLE, status_of
from rlhf.flows.report.formats import show
from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.keys import digest

if TYPE_CHECKING:
    from rlhf.flows.graph.plan import Planned
    from rlhf.flows.graph.sweep import Variant


@app.command()
def sweep(
    recipe: RecipeName,
    axes: Annotated[
        list[str],
        typer.Argument(metavar="PLACE=VALUES...", help="Values of a field: sft.epochs=1,2 or seed=0..2; repeatable."),
    ],
    sets: Sets = None,
    store: OwnStore = None,
    cluster: OnCluster = None,
    halving: Annotated[
        bool, typer.Option("--halving", help="Stop the worse half of the settings early, several times, by score.")
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of workers that share the stages; with roles, of each. They divide the devices of the recipe, "
            "such as workers.train.devices=[0,1].",
        ),
    ] = 1,
    plan: Annotated[bool, typer.Option("--plan", help="Print the plan of all runs, and run nothing.")] = False,
    no_prefect: NoPrefect = False,
) -> None:
    """Run variants of a recipe and compare their held-out scores. A stage that several variants have is computed once.

    Variants that differ in the seed alone are repetitions of one setting. Intervals are against the first setting and
    hold together. The same command resumes; a variant that fails does not stop the others.
    """
    from rlhf.flows.report.sweep import conclude, note_of
    from rlhf.flows.running.crew import check_workers

    variants, rungs = _variants(recipe, axes, with_options(sets, store, cluster), halving)
    check_workers(variants[0].recipe, (), workers)
    place = Store(variants[0].recipe.store)
    record = _record(place, variants, rungs)
    _print_plan(record, variants)
    if plan:
        return
    place.write_json(record, SWEEPS, record["name"], SWEEP)
    interrupt_at_sigterm()
    try:
        failed = _run_all(place, record, variants, workers, no_prefect)
    except KeyboardInterrupt as e:
        raise typer.Exit(130) from e
    page = conclude(place, record)
    _print_results(record)
    for line in filter(None, (note_of(record), f"page  {page}")):
        out.print(line)
    if failed:
        err.print(f"failed: {', '.join(failed)}; the same command tries again")
        raise typer.Exit(1)


def _run_all(
    store: Store, record: dict[str, Any], variants: Sequence[Variant], workers: int, no_prefect: bool
) -> list[str]:
    """Run the variants; return the names of the failed runs."""
    from rlhf.flows.cli.launch import prefect_flow
    from rlhf.flows.graph.sweep import needs_of
    from rlhf.flows.running.crew import crews_of
    from rlhf.flows.running.runner import interruptible
    from rlhf.flows.running.sharing import Sharing

    of_run = dict(zip(record["runs"], variants, strict=True))
    needs = needs_of({name: [p.node for p in variant.planned] for name, variant in of_run.items()})
    is_cached = all(p.state == "hit" for variant in variants for p in variant.planned)
    # Cached stages need no cluster.
    lent = variants[0].recipe.model_copy(update={"workers": None} if is_cached else {})
    failed: list[str] = []

    def run() -> None:
        alive = record["settings"]
        rungs = len(alive[0]["nodes"])
        for rung in range(rungs):
            alive = _better_half(store, alive, rung - 1) if rung else alive
            until = {name: of["nodes"][rung] if rung + 1 < rungs else None for of in alive for name in of["runs"]}
            jobs = {n: partial(_run, store, of_run[n], n, node, no_prefect) for n, node in until.items()}
            failed.extend(sharing.run_all({n: job for n, job in jobs.items() if n not in failed}))

    # One server for all runs.
    with (
        contextlib.nullcontext() if no_prefect or is_cached else prefect_flow(f"sweep:{record['name']}") as flow,
        crews_of(lent, record["name"], workers) as crews,
    ):
        sharing = Sharing(crews, needs)
        try:
            interruptible(run, sharing.stopped.set)
        finally:
            if flow is not None:
                from rlhf.flows.orchestration.cancellation import send_events

                send_events()
    return failed


def _variants(recipe: str, axes: Sequence[str], sets: list[str], halving: bool) -> tuple[list[Variant], list[int]]:
    """Return the checked variants, and the numbers of rounds after which halving drops settings."""
    from rlhf.flows.graph.sweep import SEED, axes_of, rungs_of, variants_of

    places = axes_of(axes)
    first = read_recipe(recipe, [*sets, *(f"{place}={values[0]}" for place, values in places.items())])
    rungs: list[int] = []
    if halving:
        if first.rl is None or "rl.rounds" in places:
            raise RecipeError("--halving stops settings between rounds of RL: it needs one value of rl.rounds")
        settings = math.prod(len(values) for place, values in places.items() if place != SEED)
        rungs = rungs_of(first.rl.rounds, settings)[:-1]
        sets = [*sets, *(f"evaluate.every={rung}" for rung in rungs[:1])]
    variants = variants_of(recipe, places, sets)
    for variant in variants:
        check(variant.recipe)
    return variants, rungs


def _record(store: Store, variants: Sequence[Variant], rungs: Sequence[int]) -> dict[str, Any]:
    """Return the record of a sweep, whose name follows from its recipes, with a run for each variant."""
    from rlhf.flows.running.naming import compared
    from rlhf.flows.running.session import now

    recipe = variants[0].recipe.name
    name = f"{recipe}-{digest([compared(v.recipe.model_dump(mode='json')) for v in variants])[:8]}"
    settings: dict[str, dict[str, Any]] = {}
    names = [_run_name(store, f"{name}.{i}", variant) for i, variant in enumerate(variants, start=1)]
    for variant, run in zip(variants, names, strict=True):
        last = f"evaluate.{policies_of(variant.recipe)[-1]}"
        nodes = [*(f"round-{rung - 1:03d}.evaluate" for rung in rungs), last]
        setting = {"values": variant.setting, "nodes": nodes, "runs": []}
        settings.setdefault(str(variant.setting), setting)["runs"].append(run)
    axes = {place: list(dict.fromkeys(v.values[place] for v in variants)) for place in variants[0].values}
    return {
        "name": name,
        "recipe": recipe,
        "started": now(),
        "axes": axes,
        "runs": names,
        "settings": list(settings.values()),
        "stages": sum(len(v.planned) for v in variants),
        "different": sum(len(v.first) for v in variants),
    }


def _run_name(store: Store, name: str, variant: Variant) -> str:
    """Return the name of a variant's run: the unfinished or up-to-date one of this name, else a free name after it."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    records = ((run, runs.read(store, run)) for run in names)
    return next(n for n, r in records if r is None or status_of(r, store) not in WHOLE or _has(r, variant.planned))


def _has(record: dict[str, Any], planned: Iterable[Planned]) -> bool:
    """Whether a run has the artifacts that the nodes have by the plan."""
    nodes = record["nodes"]
    return all(p.state == "hit" and nodes.get(p.node.name, {}).get("digest") == p.digest for p in planned)


def _run(store: Store, variant: Variant, name: str, until: str | None, no_prefect: bool) -> bool:
    """Run a variant up to a node, or to its end, unless an earlier command did; return whether it succeeded."""
    from rlhf.flows.cli.launch import launch

    nodes = {p.node.name: p.node for p in variant.planned}
    needed = with_inputs(nodes, {until}) if until else set(nodes)
    record = runs.read(store, name)
    wanted = [p for p in variant.planned if p.node.name in needed]
    if record is not None and (until or status_of(record, store) in WHOLE) and _has(record, wanted):
        return True
    out.print("  ".join([name, *(f"{place}={value}" for place, value in variant.values.items())]))
    try:
        launch(variant.recipe, no_prefect, name=name, only=needed if until else None)
    except typer.Exit as e:
        if e.exit_code != 1:
            raise
        return False
    except RecipeError as e:
        # Such as data that its rewards cannot judge: the other variants go on.
        err.print(f"{name}: {e}")
        return False
    return True


def _better_half(store: Store, settings: Sequence[dict[str, Any]], rung: int) -> list[dict[str, Any]]:
    """Return the settings with the better half of the mean scores of a rung; ones with a failed run have none."""
    scores = []
    for setting in settings:
        records = [runs.read(store, name) or {"nodes": {}} for name in setting["runs"]]
        found = [r["nodes"].get(setting["nodes"][rung], {}).get("metrics", {}).get("score") for r in records]
        if None not in found:
            scores.append((sum(found) / len(found), setting))
    scores.sort(key=lambda one: -one[0])
    return [setting for _, setting in scores[: -(-len(settings) // 2)]]


def _print_plan(record: dict[str, Any], variants: Sequence[Variant]) -> None:
    axes = list(record["axes"])
    rows = [
        (name, *(v.values[place] for place in axes), *map(str, v.counts))
        for name, v in zip(record["runs"], variants, strict=True)
    ]
    print_table(("run", *axes, "hit", "shared", "new"), rows, ("hit", "shared", "new"))
    new = [p for variant in variants for p in variant.first]
    todo = sum(p.state != "hit" for p in new)
    out.print(
        f"{record['stages']} stages, {record['different']} of them different: {len(new) - todo} hit, {todo} to compute"
        f"{guess(*expected(new))}"
    )


def _print_results(record: dict[str, Any]) -> None:
    rows = []
    for s in sorted(record["settings"], key=lambda s: -(s["score"] or 0.0)):
        d = s["difference"]
        said = f"{d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]  {d['verdict']}" if d else s["reason"]
        seeds = f" ({', '.join(map(show, s['scores']))})" if len(s["scores"]) > 1 else ""
        said = "the first" if s is record["settings"][0] else said
        rows.append((*s["values"].values(), show(s["score"]) + seeds, said, s["node"] or "", ", ".join(s["statuses"])))
    places = [place for place in record["axes"] if place in record["settings"][0]["values"]]
    print_table((*places, "score", "against the first", "after", "status"), rows)

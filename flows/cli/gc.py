"""Delete artifacts that no kept run needs, and pin runs."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from rlhf.flows.cli.shared import AsJson, StoreUrl, app, err, out, print_json, print_table, record_of, usage_error
from rlhf.flows.cli.shared import note as note_change
from rlhf.flows.recipe.retention import Retention
from rlhf.flows.retention import roots_of
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.pins import pin as write_pin
from rlhf.stages.store.pins import unpin as remove_pin
from rlhf.stages.store.runs import in_parallel

if TYPE_CHECKING:
    from rlhf.stages.store.collect import Survey

PinnedRun = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or the beginning of one name alone.")]


@app.command()
def gc(
    store: StoreUrl,
    keep: Annotated[
        int | None,
        typer.Option(min=0, help="Newest runs of each recipe to keep; 5, or 1 with --keep-days, if left out."),
    ] = None,
    keep_days: Annotated[float | None, typer.Option(min=0, help="Keep runs that began in the last DAYS days.")] = None,
    grace: Annotated[float, typer.Option(min=0, help="Keep everything that is newer, in minutes.")] = 60.0,
    yes: Annotated[bool, typer.Option("--yes/--dry-run", help="Delete. Without --yes, only list.")] = False,
    as_json: AsJson = False,
) -> None:
    """List what no kept run needs, and delete it with --yes. Running and pinned runs stay."""
    from rlhf.stages.store.collect import Limits, collect, survey

    place = Store(store)
    default = 5 if keep_days is None else 1
    retention = Retention(keep=default if keep is None else keep, keep_days=keep_days)
    limits = Limits(grace_seconds=60 * grace)
    read = functools.partial(roots_of, place, retention)
    done = collect(place, read, limits) if yes else survey(place, read(), limits)
    if as_json:
        print_json(done.as_json() | {"done": yes})
        return
    _print(done, yes)


def _print(done: Survey, yes: bool) -> None:
    going = {version.ref: version.size for version in done.garbage}
    sizes = going | {version.ref: version.size for version, _ in done.kept}
    runs = []
    for run in done.roots.runs:
        whole, lost = (decimal(sum(of.get(ref, 0) for ref in set(run.refs))) for of in (sizes, going))
        runs.append((run.name, run.why or "(goes)", whole, lost))
    print_table(("run", "stays because", "names", "goes"), runs, ("names", "goes"))
    stays: Counter[str] = Counter()
    goes: Counter[str] = Counter()
    for version, _ in done.kept:
        stays[version.stage] += version.size
    for name, size in [(v.stage, v.size) for v in done.garbage] + [(f"({r.kind})", r.bytes) for r in done.residues]:
        goes[name] += size
    stages = [(name, decimal(stays[name]), decimal(goes[name])) for name in sorted(stays.keys() | goes.keys())]
    print_table(("stage", "stays", "goes"), stages, ("stays", "goes"))
    verb = "freed" if yes else "would be freed"
    out.print(f"{decimal(done.freed)} {verb}: {len(done.garbage)} artifacts, {len(done.runs)} runs")
    if not yes and (done.garbage or done.residues or done.runs):
        out.print("nothing was deleted; type the same with --yes")


@app.command()
def pin(
    run: PinnedRun,
    store: StoreUrl,
    note: Annotated[str, typer.Option(help="Why it is kept.")] = "",
) -> None:
    """Keep a run, whatever the options of `rlhf gc`."""
    record, place = record_of(store, run), Store(store)
    name = record["name"]
    write_pin(place, name, note)
    note_change(place, "pin", run=name, outcome="pinned", reason=note)
    # After the pin: a collection that has not seen it has taken their manifests by now.
    made = [entry for entry in record["nodes"].values() if "digest" in entry]
    there = list(in_parallel(place, lambda e: place.with_digest(e["stage"], e["key"], e["digest"]), made))
    if lost := there.count(None):
        err.print(f"! {lost} of its {len(made)} artifacts are gone: a collection deletes them, or has")
    out.print(f"{name} is pinned")


@app.command()
def unpin(run: PinnedRun, store: StoreUrl) -> None:
    """Remove a run's pin."""
    place = Store(store)
    # The run may be gone: then its whole name is needed.
    if not remove_pin(place, run) and not remove_pin(place, record_of(store, run)["name"]):
        raise usage_error(f"{run} is not pinned in {place.shown}; `rlhf gc` lists pinned runs")
    note_change(place, "unpin", run=run, outcome="unpinned")
    out.print(f"{run} is unpinned")

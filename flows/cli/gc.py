"""Commands that free what no kept run needs, and that say which runs are kept."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from rlhf.flows.cli.shared import AsJson, StoreUrl, group, out, print_json, print_table, record_of, usage_error
from rlhf.flows.cli.shared import note as note_change
from rlhf.flows.recipe.retention import Retention
from rlhf.flows.retention import roots_of
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.pins import pin as write_pin
from rlhf.stages.store.pins import unpin as remove_pin

if TYPE_CHECKING:
    from rlhf.stages.store.collect import Survey
    from rlhf.stages.store.reachability import Roots

commands = group()

PinnedRun = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or the beginning of one name alone.")]


@commands.command()
def gc(
    store: StoreUrl,
    keep: Annotated[
        int | None,
        typer.Option(min=0, help="The newest runs of each recipe that stay; 5, or 1 with --keep-days, if left out."),
    ] = None,
    keep_days: Annotated[float | None, typer.Option(min=0, help="Runs that began in the last X days stay.")] = None,
    grace: Annotated[float, typer.Option(min=0, help="Minutes for which whatever is new stays.")] = 60.0,
    yes: Annotated[
        bool, typer.Option("--yes/--dry-run", help="Free it. Without --yes, only say what would go.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Free what no kept run needs: show it, or with --yes delete it. Running and pinned runs always stay."""
    from rlhf.stages.store.collect import Limits, collect, survey

    place = Store(store)
    default = 5 if keep_days is None else 1
    retention = Retention(keep=default if keep is None else keep, keep_days=keep_days)
    limits = Limits(grace_seconds=60 * grace)

    def read() -> Roots:
        return roots_of(place, retention)

    done = collect(place, read, limits) if yes else survey(place, read(), limits)
    if as_json:
        print_json(done.as_json() | {"done": yes})
        return
    _print(done, yes)


def _print(done: Survey, yes: bool) -> None:
    sizes = {version.ref: version.size for version, _ in done.kept}
    going = {version.ref: version.size for version in done.garbage}
    runs = []
    for run in done.roots.runs:
        refs = set(run.refs)
        lost = sum(going.get(ref, 0) for ref in refs)
        whole = lost + sum(sizes.get(ref, 0) for ref in refs)
        runs.append((run.name, run.why or "(goes)", decimal(whole), decimal(lost)))
    print_table(("run", "stays because", "names", "goes"), runs, ("names", "goes"))
    stays: Counter[str] = Counter()
    goes: Counter[str] = Counter()
    for version, _ in done.kept:
        stays[version.stage] += version.size
    for version in done.garbage:
        goes[version.stage] += version.size
    for residue in done.residues:
        goes[f"({residue.kind})"] += residue.bytes
    stages = [(name, decimal(stays[name]), decimal(goes[name])) for name in sorted(stays.keys() | goes.keys())]
    print_table(("stage", "stays", "goes"), stages, ("stays", "goes"))
    verb = "freed" if yes else "would be freed"
    out.print(f"{decimal(done.freed)} {verb}: {len(done.garbage)} artifacts, {len(done.runs)} runs")
    if not yes and (done.garbage or done.residues or done.runs):
        out.print("nothing was deleted; --yes does it")


@commands.command()
def pin(
    run: PinnedRun,
    store: StoreUrl,
    note: Annotated[str, typer.Option(help="Why it is kept.")] = "",
) -> None:
    """Keep a run, whatever `rlhf gc` is told to keep."""
    name = record_of(store, run)["name"]
    write_pin(Store(store), name, note)
    note_change(Store(store), "pin", run=name, outcome="pinned", reason=note)
    out.print(f"{name} is pinned")


@commands.command()
def unpin(run: PinnedRun, store: StoreUrl) -> None:
    """Take a run's pin away."""
    place = Store(store)
    # The pin of a run that is gone can be taken away by its whole name.
    if not remove_pin(place, run) and not remove_pin(place, record_of(store, run)["name"]):
        raise usage_error(f"{run} is not pinned in {place.shown}")
    note_change(place, "unpin", run=run, outcome="unpinned")
    out.print(f"{run} is not pinned any more")

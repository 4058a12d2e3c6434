"""Commands that free what no kept run needs, and that say which runs are kept."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flows.cli.shared import AsJson, StoreUrl, group, out, print_json, record_of, usage_error
from flows.cli.shared import note as note_change
from flows.keeping import roots_of
from flows.recipe.retention import Retention
from stages.store.artifacts import Store
from stages.store.pins import pin as write_pin
from stages.store.pins import unpin as remove_pin

if TYPE_CHECKING:
    from stages.store.collect import Survey
    from stages.store.reach import Roots

commands = group()

PinnedRun = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or the beginning of one name alone.")]


@commands.command()
def gc(
    store: StoreUrl,
    keep: Annotated[
        int | None,
        typer.Option(min=0, help="The newest runs of each recipe that stay; 5, or 1 with --keep-days, if left out."),
    ] = None,
    keep_days: Annotated[
        float | None, typer.Option(min=0, help="Runs that began in the last so many days stay.")
    ] = None,
    grace: Annotated[float, typer.Option(min=0, help="Minutes for which whatever is new stays.")] = 60.0,
    compile_cache: Annotated[
        float, typer.Option(min=0, help="GiB that the cache of compiled programs may take.")
    ] = 10.0,
    yes: Annotated[
        bool, typer.Option("--yes/--dry-run", help="Free it. Without --yes, only say what would go.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Free what no kept run needs: show it, or with --yes delete it. Running and pinned runs always stay."""
    from stages.common.compilation import COMPILE_CACHE
    from stages.store.collect import Limits, collect, survey

    place = Store(store)
    default = 5 if keep_days is None else 1
    retention = Retention(keep=default if keep is None else keep, keep_days=keep_days)
    cache = Path(os.environ.get(COMPILE_CACHE, Path.home() / ".cache" / "rlhf-pipeline" / "jax"))
    limits = Limits(grace_seconds=60 * grace, compile_cache=cache, compile_bytes=int(compile_cache * 2**30))

    def read() -> Roots:
        return roots_of(place, retention)

    done = collect(place, read, limits) if yes else survey(place, read(), limits)
    if as_json:
        print_json(done.as_json() | {"done": yes})
        return
    _print(done, yes)


def _print(done: Survey, yes: bool) -> None:
    runs = Table(box=None)
    for column in ("run", "stays because", "names", "goes"):
        runs.add_column(column, justify="right" if column in ("names", "goes") else "left", overflow="fold")
    sizes = {version.ref: version.size for version, _ in done.kept}
    going = {version.ref: version.size for version in done.garbage}
    for run in done.roots.runs:
        refs = set(run.refs)
        lost = sum(going.get(ref, 0) for ref in refs)
        whole = lost + sum(sizes.get(ref, 0) for ref in refs)
        runs.add_row(run.name, run.why or "(goes)", size(whole), size(lost))
    out.print(runs)
    stages = Table(box=None)
    for column in ("stage", "stays", "goes"):
        stages.add_column(column, justify="left" if column == "stage" else "right")
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for version, _ in done.kept:
        totals[version.stage][0] += version.size
    for version in done.garbage:
        totals[version.stage][1] += version.size
    for residue in done.residues:
        totals[f"({residue.kind})"][1] += residue.bytes
    for name, (stays, goes) in sorted(totals.items()):
        stages.add_row(name, size(stays), size(goes))
    out.print(stages)
    others = [why for _, why in done.kept if not why.startswith("run ")]
    if others:
        counts = Counter(
            why if why in ("too young", "named by the registry") else "read by what stays" for why in others
        )
        told = ", ".join(f"{count} {why}" for why, count in sorted(counts.items()))
        out.print(f"{len(others)} artifacts stay though no kept run names them: {told}")
    verb = "freed" if yes else "would be freed"
    out.print(f"{size(done.freed)} {verb}: {len(done.garbage)} artifacts, {len(done.runs)} runs")
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


def size(count: int) -> str:
    """Bytes for people: 512 B, 3.2 kB, 6.4 GB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"

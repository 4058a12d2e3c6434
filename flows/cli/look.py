"""Commands that look at a store: its runs, their stages and reports, the state of its files."""

from __future__ import annotations

import warnings

import typer
from rich.console import Console
from rich.table import Table

from flows.cli.shared import RunName, StoreUrl, group, out, record_of, usage_error
from flows.records import all_runs, status_of
from flows.report.formats import when
from stages.store.artifacts import Store

commands = group()


@commands.command()
def runs(store: StoreUrl) -> None:
    """List the runs of a store."""
    table = Table(box=None)
    table.add_column("run", no_wrap=True, overflow="fold")
    for column in ("status", "started", "made", "cached", "RL score"):
        table.add_column(column)
    place = Store(store)
    for record in all_runs(place):
        states = [e.get("state") for e in record["nodes"].values()]
        score = record["nodes"].get("evaluate.rl", {}).get("metrics", {}).get("score")
        shown = "" if score is None else f"{score:.3f}"
        counts = [str(states.count(state)) for state in ("made", "hit")]
        table.add_row(record["name"], status_of(record, place), when(record["started"]), *counts, shown)
    # Not cut to the width of a terminal that is not there: scripts read the names.
    (out if out.is_terminal else Console(highlight=False, markup=False, width=1000)).print(table)


@commands.command()
def show(store: StoreUrl, run_name: RunName = None) -> None:
    """Show a run: each stage with its state, time, key and first figures."""
    from stages.contract.registry import stage

    record, place = record_of(store, run_name, partial=True), Store(store)
    out.print(f"{record['name']}  {status_of(record, place)}  {record['started']}")
    for name, e in record["nodes"].items():
        figures = stage(e["stage"]).figures(e["metrics"]) if "metrics" in e else e.get("error", "")
        # A stage that runs, or was killed, has no end.
        seconds = f"{e['seconds']:.1f} s" if "seconds" in e else ""
        out.print(f"  {name:<20} {e['state']:<11} {seconds:>8}  {e['key'][:12]}  {figures}", soft_wrap=True)
    out.print(f"report  {place.join('runs', record['name'], 'report.html')}", soft_wrap=True)
    out.print(f"log     {place.scratch / 'runs' / record['name'] / 'worker.log'}", soft_wrap=True)


@commands.command()
def report(store: StoreUrl, run_name: RunName = None) -> None:
    """Write a run's HTML report again and print where it is."""
    from flows.report.page import write_report

    out.print(write_report(Store(store), record_of(store, run_name)["name"]), soft_wrap=True)


@commands.command()
def verify(store: StoreUrl) -> None:
    """Check the checksums of every artifact in a store; set damaged ones aside."""
    place = Store(store)
    keys = place.all_keys()
    if not keys:
        # A disk that is not mounted looks the same as a store in which all is well.
        raise usage_error(f"no artifacts in {place.shown}: name the store with --store, or mount it")
    damages = [damage for stage, key in keys if (damage := _damage(place, stage, key))]
    for damage in damages:
        out.print(f"damaged: {damage}", soft_wrap=True)
    hint = "; the next run makes them again" if damages else ""
    out.print(f"{len(keys)} artifacts, {len(damages)} damaged{hint}")
    raise typer.Exit(1 if damages else 0)


def _damage(store: Store, stage: str, key: str) -> str | None:
    """What is wrong with an artifact, which is then set aside; None where all checksums are right."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Without a readable manifest `get` itself sets the artifact aside, and warns.
        artifact = store.get(stage, key)
    if artifact is None:
        return str(caught[-1].message) if caught else key
    fault = store.verify(artifact)
    return f"{artifact.url}: {fault}; moved to {store.set_aside(stage, key)}" if fault else None

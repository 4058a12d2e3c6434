"""Commands that show a store: its runs, their stages and reports, damaged files."""

from __future__ import annotations

import shlex
from typing import Any

import typer

from rlhf.flows.cli.shared import (
    AsJson,
    RunName,
    StoreUrl,
    app,
    note,
    out,
    print_json,
    print_table,
    record_of,
    usage_error,
)
from rlhf.flows.records import log_of, readable_runs, status_of, summary_of
from rlhf.flows.report.decisions import decision_lines
from rlhf.flows.report.formats import when
from rlhf.stages.store.artifacts import IT_STAYS, Store
from rlhf.stages.store.damage import fault_of, set_aside
from rlhf.stages.store.leases import beats
from rlhf.stages.store.readonly import refused


@app.command()
def runs(store: StoreUrl, as_json: AsJson = False) -> None:
    """List the runs of a store."""
    place = Store(store)
    found = [summary_of(record, place) for record in readable_runs(place)]
    if as_json:
        print_json({"store": place.shown, "runs": found})
        return
    rows = []
    for run in found:
        score = run["scores"].get("rl")
        shown = "" if score is None else f"{score:.3f}"
        rows.append((run["name"], run["status"], when(run["started"]), str(run["made"]), str(run["cached"]), shown))
    print_table(("run", "status", "started", "made", "cached", "RL score"), rows)


NODE_KEYS = ("stage", "state", "key", "digest", "started", "seconds", "made_seconds", "metrics", "error")
"""Keys of each stage in `rlhf show --json`; unknown values are null."""


@app.command()
def show(store: StoreUrl, run_name: RunName = None, as_json: AsJson = False) -> None:
    """Show a run: each stage with its state, time, key and first figures."""
    from rlhf.stages.contract.registry import stage

    record, place = record_of(store, run_name, partial=True), Store(store)
    status = status_of(record, place)
    for entry in record["nodes"].values():
        # A killed run has recorded no end of its stage.
        entry["state"] = status if entry["state"] == "running" else entry["state"]
    if as_json:
        nodes = [{"node": n} | {key: e.get(key) for key in NODE_KEYS} for n, e in record["nodes"].items()]
        more = {"tries": record.get("tries"), "error": record.get("error"), "nodes": nodes} | _places(record, place)
        print_json(summary_of(record, place) | more)
        return
    out.print(f"{record['name']}  {status}  {record['started']}")
    for name, e in record["nodes"].items():
        figures = stage(e["stage"]).figures(e["metrics"]) if "metrics" in e else e.get("error", "")
        # A running or killed stage has no end.
        seconds = f"{e['seconds']:.1f} s" if "seconds" in e else ""
        out.print(f"  {name:<20} {e['state']:<11} {seconds:>8}  {e['key'][:12]}  {figures}")
    if error := record.get("error"):
        out.print(f"error   {error}")
    for line in decision_lines(record):
        out.print(line)
    command = shlex.join(["rlhf", "report", record["name"], "--store", store])
    none = {"report": f"none: type `{command}`", "log": "none: no worker was started"}
    for name, where in _places(record, place).items():
        out.print(f"{name:<7} {where or none[name]}")


def _places(record: dict[str, Any], store: Store) -> dict[str, str | None]:
    """Return the places of a run's report and log; None without one."""
    log = log_of(store, record["name"])
    # The log may be on another machine, or in a moved store.
    where = str(log) if log.exists() else record.get("log", str(log)) if record.get("worker_starts") != 0 else None
    report = ("runs", record["name"], "report.html")
    there = store.fs.exists(store.join(*report))
    return {"report": store.address(*report) if there else None, "log": where}


@app.command()
def report(store: StoreUrl, run_name: RunName = None) -> None:
    """Write a run's HTML report, and print its path."""
    from rlhf.flows.report.page import write_report

    out.print(write_report(Store(store), record_of(store, run_name)["name"]))


@app.command()
def verify(store: StoreUrl, as_json: AsJson = False) -> None:
    """Check the checksums of all artifacts, and set damaged ones aside."""
    place = Store(store)
    keys = place.all_keys()
    if not keys:
        # An unmounted disk looks like an empty store.
        raise usage_error(f"no artifacts in {place.shown}: name the store with --store, or mount it")
    damages = [damage for stage, key in keys if (damage := _damage(place, stage, key))]
    if damages and not place.read_only:
        note(place, "verify", outcome=f"{len(damages)} set aside", damaged=damages)
    if as_json:
        print_json({"store": place.shown, "artifacts": len(keys), "damaged": damages})
    else:
        for damage in damages:
            out.print(f"damaged: {damage}")
        hint = "; `rlhf run` recomputes them" if damages and not place.read_only else ""
        out.print(f"{len(keys)} artifacts, {len(damages)} damaged{hint}")
    raise typer.Exit(1 if damages else 0)


def _damage(store: Store, stage: str, key: str) -> str | None:
    """Set a damaged artifact aside, and describe the damage; None without any."""
    _, fault = fault_of(store, stage, key)
    # A process that computes the artifact replaces it.
    if fault is None or beats(store, stage, key):
        return None
    if not store.read_only:
        try:
            return set_aside(store, stage, key, out.print)
        except Exception as e:
            if not refused(e):
                raise
    return f"{store.address('artifacts', stage, key)}: {fault}; {IT_STAYS}"

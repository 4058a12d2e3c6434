"""`rlhf audit`: what holds in every run, checked for one run from its artifacts."""

from __future__ import annotations

from typing import Annotated

import typer

from rlhf.flows.cli.shared import AsJson, RunName, StoreUrl, err, group, out, print_json, record_of
from rlhf.stages.auditing.laws import SHOWN, Finding, audit
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.readonly import ReadOnlyStore, refused

commands = group()

FILE = "audit.json"
Deep = Annotated[bool, typer.Option("--deep", help="Read every byte, and make the last update again.")]


@commands.command(name="audit")
def audit_run(store: StoreUrl, run_name: RunName = None, deep: Deep = False, as_json: AsJson = False) -> None:
    """Check what must hold in any run from what this one left: digests, prompts, rewards, advantages, leakage.

    One line a law; the report gets them as a table. Exit status 1 where one is broken.
    """
    place, record = Store(store), record_of(store, run_name)
    if not as_json:
        out.print(f"{record['name']}  {place.shown}")
    verdicts = []
    for verdict in audit(place, record, deep=deep):
        verdicts.append(verdict)
        if not as_json:
            _show(verdict)
    broken = [verdict.law.name for verdict in verdicts if verdict.broken]
    report = _written(place, record["name"], verdicts)
    if as_json:
        laws = [verdict.as_json() for verdict in verdicts]
        print_json({"run": record["name"], "store": place.shown, "laws": laws, "broken": broken, "report": report})
        raise typer.Exit(1 if broken else 0)
    if report is not None:
        out.print(f"report  {report}")
    if broken:
        out.print(f"{len(broken)} of {len(verdicts)} laws are broken: {', '.join(broken)}")
    raise typer.Exit(1 if broken else 0)


def _written(store: Store, run: str, verdicts: list[Finding]) -> str | None:
    """Writes the table and the report that shows it, and says where; None where the store is read-only here."""
    from rlhf.flows.report.page import write_report

    try:
        store.write_json([verdict.as_json() for verdict in verdicts], "runs", run, FILE)
        return write_report(store, run)
    except (ReadOnlyStore, OSError) as e:
        if not refused(e):
            raise
        err.print(f"! the report was not written: {e}")
        return None


def _show(found: Finding) -> None:
    cases = f"{found.checked} {found.law.unit}"
    out.print(f"  {found.state:<8} {found.law.name:<12} {cases:<24} {found.law.says}")
    more = [f"and {len(found.broken) - SHOWN} more"] if len(found.broken) > SHOWN else []
    for text in [*found.broken[:SHOWN], *more, *(f"not checked: {text}" for text in found.left_out[:SHOWN])]:
        out.print(f"           {text}")

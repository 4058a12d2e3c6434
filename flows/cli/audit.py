"""`rlhf audit`: check the invariants of a run on its artifacts."""

from __future__ import annotations

import typer

from rlhf.flows.cli.shared import AsJson, RunName, StoreUrl, app, err, out, print_json, record_of, usage_error
from rlhf.stages.auditing.audit import audit
from rlhf.stages.auditing.laws import Finding
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.readonly import ReadOnlyStore, refused

SHOWN = 3
"""Broken cases that the output lists for each law."""


@app.command(name="audit")
def audit_run(store: StoreUrl, run_name: RunName = None, as_json: AsJson = False) -> None:
    """Check the invariants of a run on its artifacts: digests, prompts, rewards, advantages, leakage.

    Prints one line per law, and adds a table to the report. Exit status 1 if one is broken.
    """
    place, record = Store(store), record_of(store, run_name)
    findings = audit(place, record)
    if not any("digest" in entry for entry in record["nodes"].values()):
        raise usage_error(f"run {record['name']} has no finished stage to check yet")
    laws = [finding.as_json() for finding in findings]
    broken = [finding.law.name for finding in findings if finding.broken]
    report = _write(place, record["name"], laws)
    if as_json:
        print_json({"run": record["name"], "store": place.shown, "laws": laws, "broken": broken, "report": report})
    else:
        out.print(f"{record['name']}  {place.shown}")
        for finding in findings:
            _print(finding)
        if report is not None:
            out.print(f"report  {report}")
        if broken:
            out.print(f"{len(broken)} of {len(findings)} laws are broken: {', '.join(broken)}")
    raise typer.Exit(1 if broken else 0)


def _write(store: Store, run: str, laws: list[dict[str, object]]) -> str | None:
    """Write the results and the report, and return the report's address; None if the store is read-only."""
    from rlhf.flows.report.page import write_report

    try:
        store.write_json(laws, "runs", run, "audit.json")
        return write_report(store, run)
    except (ReadOnlyStore, OSError) as e:
        if not refused(e):
            raise
        err.print(f"! the report was not written: {e}")
        return None


def _print(finding: Finding) -> None:
    cases = f"{finding.checked} {finding.law.unit}"
    out.print(f"  {finding.state:<8} {finding.law.name:<12} {cases:<24} {finding.law.says}")
    more = [f"and {len(finding.broken) - SHOWN} more"] if len(finding.broken) > SHOWN else []
    for text in [*finding.broken[:SHOWN], *more, *(f"not checked: {text}" for text in finding.left_out[:SHOWN])]:
        out.print(f"           {text}")

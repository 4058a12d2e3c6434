"""Commands that name policies, such as `champion`, and keep the history of each name."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from rlhf.flows.cli.shared import (
    AsJson,
    NodeName,
    RunName,
    StoreUrl,
    app,
    artifact_of,
    err,
    note,
    out,
    print_json,
    record_of,
    usage_error,
)
from rlhf.flows.records import REFUSED
from rlhf.flows.report.formats import when
from rlhf.stages.store import registry
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.registry import CHAMPION, Entry, Policy

Alias = Annotated[str, typer.Option("--as", metavar="NAME", help="Name of the policy.")]
Reason = Annotated[str, typer.Option("--reason", help="Reason, for the history.")]


@app.command()
def promote(
    store: StoreUrl,
    run_name: RunName = None,
    alias: Alias = CHAMPION,
    node: NodeName = "export",
    reason: Reason = "",
    force: Annotated[
        bool, typer.Option("--force", help="Also promote a policy that a gate refused; the history notes it.")
    ] = False,
) -> None:
    """Name the policy of a run, by default `champion`; serve, chat and export accept the name."""
    record = record_of(store, run_name, node)
    if record["nodes"].get(node, {}).get("state") == REFUSED:
        # It has no export: name the policy itself.
        decided = (record.get("decision") or {}).get("candidate")
        node = next((name for name, e in record["nodes"].items() if e.get("digest") == decided), "export")
    policy = _policy(Store(store), record, node)
    refused = registry.refusal_of(Store(store), alias, policy.trained)
    if refused is not None and not force:
        raise usage_error(f"{refused}; --force promotes it anyway, and the history notes it")
    entry = registry.promote(Store(store), alias, policy, reason, forced=refused is not None)
    _changed(Store(store), "promote", alias, entry)


@app.command()
def rollback(
    store: StoreUrl,
    alias: Alias = CHAMPION,
    to: Annotated[int | None, typer.Option("--to", metavar="N", help="Entry to return to.", min=1)] = None,
    reason: Reason = "",
) -> None:
    """Return a name to its earlier policy; the history keeps both."""
    entry = registry.rollback(Store(store), alias, to, reason)
    _changed(Store(store), "rollback", alias, entry)


@app.command()
def champions(store: StoreUrl, as_json: AsJson = False) -> None:
    """List the names of policies with their history; the newest entry, which holds, comes first."""
    place = Store(store)
    found = {name: registry.history(place, name) for name in registry.names(place)}
    if as_json:
        print_json({name: [dataclasses.asdict(e) for e in reversed(entries)] for name, entries in found.items()})
        return
    if not found:
        out.print(f"no names in {place.shown}; `rlhf promote RUN` adds one")
    for name, entries in found.items():
        for entry in reversed(entries):
            out.print(_line(name, entry))


def _policy(store: Store, record: dict[str, Any], node: str) -> Policy:
    """Return the policy of a run's node for the registry; exit if it or its base is gone."""
    artifact, base = artifact_of(store, record, node), artifact_of(store, record, "base")
    store.ensure_whole(artifact)
    return Policy(
        run=record["name"],
        node=node,
        stage=artifact.stage,
        key=artifact.key,
        digest=artifact.digest,
        base=base.key,
        base_digest=base.digest,
        trained=artifact.manifest["inputs"]["policy"]["digest"] if artifact.stage == "export" else artifact.digest,
    )


def _changed(store: Store, what: str, name: str, entry: Entry) -> None:
    """Add a change of a name to the store's history, and print it with its effect on servers."""
    outcome = f"{name} is entry {entry.number}"
    more = {"digest": entry.policy.digest, "reason": entry.reason, "forced": entry.forced}
    note(store, what, run=entry.policy.run, outcome=outcome, **more)
    out.print(_line(name, entry))
    # After the entry: a collection that has not seen it has taken the manifest by now.
    if store.with_digest(entry.policy.stage, entry.policy.key, entry.policy.digest) is None:
        raise usage_error(f"the policy is gone: `rlhf gc` deletes it; `rlhf rollback --as {name}` returns")
    served = f"`rlhf serve {name} --follow` loads it within half a minute; without --follow restart the server"
    if len({e.policy.base for e in registry.history(store, name)[-2:]}) > 1:
        served = f"its base model differs from the previous entry's: restart the servers of {name}, also with --follow"
    err.print(served)


def _line(name: str, entry: Entry) -> str:
    """`champion 3  run NAME export  digest 0123456789ab  24 Nov 10:00  user@host  back to 1  (reason)`."""
    parts = [
        f"{name} {entry.number}",
        f"run {entry.policy.run} {entry.policy.node}",
        f"digest {entry.policy.digest[:12]}",
        when(entry.when),
        entry.who,
        "" if entry.restores is None else f"back to {entry.restores}",
        "forced past its gate" if entry.forced else "",
        f"({entry.reason})" if entry.reason else "",
    ]
    return "  ".join(part for part in parts if part)

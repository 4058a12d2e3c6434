"""Commands that give policies names: `champion` and others, with their history."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from rlhf.flows.cli.shared import (
    AsJson,
    NodeName,
    RunName,
    StoreUrl,
    artifact_of,
    err,
    group,
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

commands = group()

Alias = Annotated[str, typer.Option("--as", metavar="NAME", help="The name; each has its own history.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; it stays in the history.")]


@commands.command()
def promote(
    store: StoreUrl,
    run_name: RunName = None,
    alias: Alias = CHAMPION,
    node: NodeName = "export",
    reason: Reason = "",
    force: Annotated[
        bool, typer.Option("--force", help="Also a policy that a gate has refused; the history says `forced`.")
    ] = False,
) -> None:
    """Give the policy of a run a name, `champion`, that serve, chat and export take in place of a run's."""
    record = record_of(store, run_name, node)
    if record["nodes"].get(node, {}).get("state") == REFUSED:
        # No export was made of it: the name stands for the policy itself, as in a run without one.
        node = _behind_the_gate(record)
    policy = _policy(Store(store), record, node)
    refused = registry.refusal_of(Store(store), alias, policy.trained)
    if refused is not None and not force:
        raise usage_error(f"{refused}; `--force` makes it {alias} all the same, and the history says so")
    entry = registry.promote(Store(store), alias, policy, reason, forced=refused is not None)
    _changed(Store(store), "promote", alias, entry)


@commands.command()
def rollback(
    store: StoreUrl,
    alias: Alias = CHAMPION,
    to: Annotated[int | None, typer.Option("--to", metavar="N", help="The entry to go back to.", min=1)] = None,
    reason: Reason = "",
) -> None:
    """Let a name stand again for the policy that it stood for before; the history keeps both."""
    entry = registry.rollback(Store(store), alias, to, reason)
    _changed(Store(store), "rollback", alias, entry)


@commands.command()
def champions(store: StoreUrl, as_json: AsJson = False) -> None:
    """List the names of policies with their history, the newest entry first: it is what the name stands for."""
    place = Store(store)
    found = {name: registry.history(place, name) for name in registry.names(place)}
    if as_json:
        print_json({name: [dataclasses.asdict(e) for e in reversed(entries)] for name, entries in found.items()})
        return
    if not found:
        out.print(f"no names in {place.shown}; `rlhf promote RUN` makes the first")
    for name, entries in found.items():
        for entry in reversed(entries):
            out.print(_line(name, entry))


def _policy(store: Store, record: dict[str, Any], node: str) -> Policy:
    """The policy of a run's node, as a name stands for it; a usage error where it or its base is gone."""
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


def _behind_the_gate(record: dict[str, Any]) -> str:
    """The node of the policy that a run's gate has decided about."""
    decided = (record.get("decision") or {}).get("candidate")
    return next((name for name, e in record["nodes"].items() if e.get("digest") == decided), "export")


def _changed(store: Store, what: str, name: str, entry: Entry) -> None:
    """Adds a change of a name to the store's trail, and prints it with what servers of the name do now."""
    outcome = f"{name} is entry {entry.number}"
    more = {"digest": entry.policy.digest, "reason": entry.reason, "forced": entry.forced}
    note(store, what, run=entry.policy.run, outcome=outcome, **more)
    out.print(_line(name, entry))
    served = f"`rlhf serve {name} --follow` takes it within half a minute; without --follow restart the server"
    if len({e.policy.base for e in registry.history(store, name)[-2:]}) > 1:
        served = f"its base model is not that of the entry before: restart the servers of {name}, also with --follow"
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

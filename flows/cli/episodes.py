"""`rlhf episodes`: list the episodes of a run, or export them as trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf.flows.cli.shared import RunName, StoreUrl, app, artifact_of, out, print_table, record_of, usage_error
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.store.manifests import is_inside

Node = Annotated[str, typer.Option("--node", help="Nodes whose names begin so: round-003, evaluate.")]
Statuses = Annotated[
    list[str] | None,
    typer.Option("--status", help="Episodes with this end: done, turn_limit, failed, ...; repeatable."),
]
Success = Annotated[
    bool | None, typer.Option("--success/--no-success", help="Episodes that reached their goal, or not.")
]
Atif = Annotated[
    Path | None,
    typer.Option("--atif", metavar="FOLDER", help="Write each episode as ATIF, Harbor's JSON, to this folder."),
]
COLUMNS = ("node", "place", "sample", "task", "seed", "status", "turns", "tokens", "reward", "success")
PLAYING = ("rollout", "refill", "greedy", "evaluate")
"""Stages that play episodes."""


@app.command()
def episodes(
    store: StoreUrl,
    run_name: RunName = None,
    node: Node = "",
    status: Statuses = None,
    success: Success = None,
    atif: Atif = None,
) -> None:
    """List the episodes of a run, or export them with their token ids (ATIF)."""
    from rlhf.stages.tools.episodes import STATUSES, selected, write

    unknown = sorted(set(status or ()) - set(STATUSES))
    if unknown:
        raise usage_error(f"unknown --status {unknown[0]!r}: use one of {', '.join(STATUSES)}")
    record = record_of(store, run_name)
    tables = _tables(Store(store), record, node)

    def wanted(row: Any) -> bool:
        return (not status or row.status in status) and success in (None, row.success)

    if atif is None:
        rows = [(name, *_cells(row)) for name, artifact in tables.items() for row in selected(artifact, wanted)]
        print_table(COLUMNS, rows, ("place", "sample", "seed", "turns", "tokens", "reward"))
        out.print(f"{len(rows)} episodes")
        return
    if atif.exists() and any(atif.iterdir()):
        raise usage_error(f"--atif {atif} is not empty: name another folder")
    count = sum(write(artifact, f"{record['name']}.{name}", wanted, atif / name) for name, artifact in tables.items())
    out.print(f"{count} episodes in {atif}")


def _tables(store: Store, record: dict[str, Any], node: str) -> dict[str, Artifact]:
    """Return the artifacts with episodes whose node begins with `node`."""
    names = [
        name
        for name, entry in record["nodes"].items()
        if "digest" in entry and name.startswith(node) and is_inside(name) and entry["stage"] in PLAYING
    ]
    artifacts = {name: artifact_of(store, record, name) for name in names}
    tables = {name: artifact for name, artifact in artifacts.items() if artifact.has("trajectories/")}
    if not tables:
        which = f"nodes {node}* of run {record['name']} have" if node else f"run {record['name']} has"
        raise usage_error(f"{which} no episodes: choose another --node, or set environment.name in the recipe")
    return tables


def _cells(row: Any) -> tuple[str, ...]:
    reward = "" if row.reward is None else f"{row.reward:.3g}"
    success = {True: "yes", False: "no", None: ""}[row.success]
    numbers = (row.turns, row.sampled_tokens)
    return (
        str(row.place),
        str(row.sample),
        row.prompt_id,
        str(row.seed),
        row.status,
        *map(str, numbers),
        reward,
        success,
    )

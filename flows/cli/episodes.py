"""`rlhf episodes`: the episodes of a run, and their export as trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.flows.cli.shared import RunName, StoreUrl, artifact_of, group, out, print_table, record_of, usage_error
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.store.manifests import is_inside

if TYPE_CHECKING:
    from rlhf.stages.tools.episodes import Choice

commands = group()

Node = Annotated[str, typer.Option("--node", help="Of this node, or of those that begin so: round-003, evaluate.")]
Statuses = Annotated[
    list[str] | None, typer.Option("--status", help="That ended so: done, turn_limit, failed, ...; repeatable.")
]
Task = Annotated[str | None, typer.Option("--task", help="Of the task with this id.")]
Success = Annotated[bool | None, typer.Option("--success/--no-success", help="That reached their goal, or did not.")]
Most = Annotated[int, typer.Option("--most", min=1, help="Lines of the list; the export has all.")]
Atif = Annotated[
    Path | None,
    typer.Option("--atif", metavar="FOLDER", help="Write each as ATIF, Harbor's JSON of trajectories, in this folder."),
]


@commands.command()
def episodes(
    store: StoreUrl,
    run_name: RunName = None,
    node: Node = "",
    status: Statuses = None,
    task: Task = None,
    success: Success = None,
    most: Most = 40,
    atif: Atif = None,
) -> None:
    """List the episodes of a run, or export them with their token ids (ATIF)."""
    from rlhf.stages.tools.episodes import STATUSES, Choice

    unknown = sorted(set(status or ()) - set(STATUSES))
    if unknown:
        raise usage_error(f"no status {unknown[0]!r}; there are {', '.join(STATUSES)}")
    place, record = Store(store), record_of(store, run_name)
    tables = _tables(place, record, node)
    choice = Choice(frozenset(status or ()), task, success)
    if atif is not None:
        _export(tables, record["name"], choice, atif)
    else:
        _list(tables, choice, most)


def _tables(store: Store, record: dict[str, Any], node: str) -> dict[str, Artifact]:
    """The artifacts with episodes of the nodes that begin with `node`, by their nodes."""
    from rlhf.stages.tools.episodes import has_episodes

    played = [n for n, entry in record["nodes"].items() if "digest" in entry and n.startswith(node) and is_inside(n)]
    found = {n: artifact_of(store, record, n) for n in played if record["nodes"][n]["stage"] in PLAYING}
    tables = {name: artifact for name, artifact in found.items() if has_episodes(artifact)}
    if not tables:
        which = f"nodes {node}* of run {record['name']} have" if node else f"run {record['name']} has"
        raise usage_error(f"{which} no episodes: its recipe names no environment, or none ended")
    return tables


PLAYING = ("rollout", "refill", "greedy", "evaluate")
"""Stages that play."""


def _list(tables: dict[str, Artifact], choice: Choice, most: int) -> None:
    from rlhf.stages.tools.episodes import chosen

    rows, count = [], 0
    for name, artifact in tables.items():
        for row in chosen(artifact, choice):
            count += 1
            if count <= most:
                reward = "" if row.reward is None else f"{row.reward:.3g}"
                success = {True: "yes", False: "no", None: ""}[row.success]
                numbers = [str(n) for n in (row.turns, row.sampled_tokens)]
                place = [str(row.place), str(row.sample), row.prompt_id, str(row.seed)]
                rows.append((name, *place, row.status, *numbers, reward, success))
    columns = ("node", "place", "sample", "task", "seed", "status", "turns", "tokens", "reward", "success")
    print_table(columns, rows, ("place", "sample", "seed", "turns", "tokens", "reward"))
    out.print(f"{count} episodes" + (f", the first {most} are shown" if count > most else ""))


def _export(tables: dict[str, Artifact], run: str, choice: Choice, folder: Path) -> None:
    from rlhf.stages.tools.episodes import write

    if folder.exists() and any(folder.iterdir()):
        raise usage_error(f"{folder} exists and is not empty")
    count = sum(write(artifact, f"{run}.{name}", choice, folder / name) for name, artifact in tables.items())
    out.print(f"{count} episodes in {folder}")

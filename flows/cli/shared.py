"""Options, output, errors and access to runs, shared by the commands."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from types import FrameType
from typing import Annotated, Any

import typer
from pydantic_core import to_json
from rich.table import Table

from rlhf.flows.recipe.model import Recipe
from rlhf.flows.records import REFUSED, candidates, finished_nodes, refusal_of, whole_first
from rlhf.flows.report.terminal import LastingConsole, PlainConsole
from rlhf.stages.store.artifacts import IT_STAYS, Artifact, Store
from rlhf.stages.store.audit_log import append
from rlhf.stages.store.registry import current
from rlhf.stages.worker import interpreter
from rlhf.stages.worker.client import worker_environment

# Lines are not cut where no terminal shows them: scripts read them.
out = PlainConsole(highlight=False, markup=False, soft_wrap=True)
err = LastingConsole(stderr=True, highlight=False, markup=False, soft_wrap=True)

ONCE_SECONDS = 5.0
"""In which several signals are one interruption."""
DEFAULT_STORE: str = Recipe.model_fields["store"].default

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A built-in recipe's name or the path of a YAML file.")
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Set one field of the recipe; repeatable.")
]


def _existing(url: str) -> str:
    """The URL of a store; a usage error if there is none: a mistyped bucket looks like an empty store."""
    store = Store(url)
    try:
        store.fs.info(store.root)
    except FileNotFoundError:
        hint = "`rlhf run` creates one, in a bucket that exists; name another with --store, or mount it"
        raise usage_error(f"no store at {store.shown}: {hint}") from None
    except Exception as e:
        # Clients of object stores have classes of their own: the endpoint is down, or there are no credentials.
        raise usage_error(f"the store {store.shown} cannot be reached: {type(e).__name__}: {e}") from e
    return url


StoreUrl = Annotated[
    str,
    typer.Option(
        "--store",
        callback=_existing,
        help=f"Folder or fsspec URL of the artifacts; {DEFAULT_STORE} if left out.",
        default_factory=lambda: DEFAULT_STORE,
        show_default=False,
    ),
]
RunName = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="A run, or a recipe for its newest; the newest run if left out."),
]
NodeName = Annotated[str, typer.Option("--node", help="Which policy: export, sft, base or round-003.update.")]
NoPrefect = Annotated[bool, typer.Option("--no-prefect", help="Run the stages without Prefect: no server, no UI.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, with the keys of docs/operations.md.")]


def print_json(value: Any) -> None:
    """Prints a JSON document, the only thing on standard output; numbers that JSON has not are null."""
    typer.echo(to_json(value, indent=1, inf_nan_mode="null"))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> None:
    """Prints a table, outside of a terminal not cut to the width of one: scripts read it. right: columns of numbers."""
    table = Table(box=None)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = out if out.is_terminal else PlainConsole(highlight=False, markup=False, width=1000)
    console.print(table, soft_wrap=False)


def note(store: Store, what: str, **fields: Any) -> None:
    """Adds what a command has done to the store's trail; a trail that cannot be written is told, and fails nothing."""
    if store.read_only:
        return
    if failed := append(store, what, **fields):
        err.print(f"! not in the trail: {failed}")


def interrupt_at_sigterm() -> None:
    """Has SIGTERM end this process as Ctrl-C does: with what it has begun recorded as interrupted.

    As the first process of a container it would not even end otherwise, until it is killed. What ends a job may send
    several signals at once: those within ONCE_SECONDS of the first are the same interruption, and do not end the
    recording of it, which standard error says once.
    """
    first, told = -math.inf, False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal first, told
        now = time.monotonic()
        if now - first > ONCE_SECONDS:
            first, told = now, False
            raise KeyboardInterrupt
        if not told:
            told = True
            # Not by a file object, in the midst of whose writing the signal may have come.
            with contextlib.suppress(OSError):
                os.write(2, f"already ending; another signal after {ONCE_SECONDS:.0f} s ends at once\n".encode())

    # A script's process in the background ignores Ctrl-C, and goes on doing so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)


def group() -> typer.Typer:
    """The commands of one module; `rlhf.flows.cli.app` joins the groups."""
    return typer.Typer(rich_markup_mode=None)


def usage_error(message: str) -> typer.Exit:
    """Prints one clear error; exit code 2."""
    err.print(f"error: {message}")
    return typer.Exit(2)


def record_of(store: str, name: str | None, node: str | None = None, partial: bool = False) -> dict[str, Any]:
    """The run that a name stands for; the newest where it is None. Says which, where the name is not the run's own.

    node: of several runs, those in which that node is finished go first. partial: whether a run of a part of its recipe
    counts like any other; else whole ones go first.
    """
    found = candidates(Store(store), name)
    found = found if partial else whole_first(found)
    # The newest run may be unfinished, or one whose recipe lacks that node.
    chosen = next((r for r in found if node is None or node in finished_nodes(r)), found[0])
    if chosen["name"] != name:
        err.print(f"run {chosen['name']}")
    return chosen


def named(store: str, name: str | None, node: str) -> tuple[dict[str, Any], str]:
    """The run and the node of a policy by a name of the registry, such as `champion`, or else by a run's name.

    The record has the artifact that was promoted: its entry's key and digest take the place of the node's.
    """
    entry = current(Store(store), name) if name is not None else None
    if entry is None:
        return record_of(store, name, node), node
    policy, record = entry.policy, record_of(store, entry.policy.run)
    err.print(f"{name} is run {policy.run}, entry {entry.number}")
    of_entry = {"stage": policy.stage, "key": policy.key, "digest": policy.digest}
    nodes = record["nodes"] | {
        policy.node: record["nodes"].get(policy.node, {}) | of_entry,
        "base": record["nodes"].get("base", {}) | {"stage": "base", "key": policy.base, "digest": policy.base_digest},
    }
    if policy.node == "base":
        nodes["base"] |= of_entry
    return record | {"nodes": nodes}, policy.node


def artifact_of(store: Store, record: dict[str, Any], node: str) -> Artifact:
    """The artifact of a run's node; a usage error where it is not finished or no longer stored."""
    entry = record["nodes"].get(node)
    if entry is not None and entry["state"] == REFUSED:
        raise usage_error(
            f"run {record['name']} has no {node}: its gate has refused the policy ({refusal_of(record)}); "
            f"`rlhf export {record['name']} --force` makes it all the same, and --node names another policy"
        )
    if entry is None or "digest" not in entry:
        raise usage_error(f"run {record['name']} has no finished {node}; finished are {', '.join(record['nodes'])}")
    # By digest: another run may have made the key anew since.
    artifact = store.with_digest(entry["stage"], entry["key"], entry["digest"])
    if artifact is None:
        _, fault = store.examine(entry["stage"], entry["key"])
        if fault is not None:
            place = store.address("artifacts", entry["stage"], entry["key"])
            stays = f"; {IT_STAYS}" if store.read_only else ""
            raise usage_error(
                f"{node} of {record['name']} is damaged: {place}: {fault}{stays}; `rlhf run` makes it again"
            )
        raise usage_error(f"{node} of {record['name']} is gone from {store.shown}; `rlhf run` makes it again")
    return artifact


def become(module: str, argument: str) -> None:
    """Replaces this process (exec) with a module, so that signals reach the program and no child outlives it."""
    sys.stdout.flush()
    os.execve(sys.executable, interpreter.command(module, argument), worker_environment())

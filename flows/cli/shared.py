"""The application, its options, output and errors, and access to runs, shared by the commands."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from types import FrameType
from typing import Annotated, Any

import typer
from pydantic_core import to_json
from rich.table import Table
from typer.core import TyperGroup

from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.records import REFUSED, UnknownRun, candidates, finished_nodes, refusal_of, whole_first
from rlhf.flows.report.terminal import LastingConsole, PlainConsole
from rlhf.stages.serving.access import AccessError
from rlhf.stages.store.artifacts import IT_STAYS, Artifact, ArtifactError, Store
from rlhf.stages.store.audit_log import append
from rlhf.stages.store.readonly import ReadOnlyStore
from rlhf.stages.store.registry import CHAMPION, RegistryError, current
from rlhf.stages.worker import interpreter
from rlhf.stages.worker.client import worker_environment


class Commands(TyperGroup):
    """All commands in alphabetical order; a mistake of the user is an error of one line."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands)

    def invoke(self, ctx: Any) -> Any:
        """As `TyperGroup.invoke`; exit code 2 after a mistake."""
        try:
            return super().invoke(ctx)
        except (RecipeError, UnknownRun, RegistryError, AccessError, ArtifactError, ReadOnlyStore) as e:
            raise usage_error(str(e)) from e


app = typer.Typer(
    cls=Commands,
    help="Post-training as explicit, cached, resumable stages: data, SFT, reward model, RL rounds, evaluation, export.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# Scripts read the lines: do not wrap them.
out = PlainConsole(highlight=False, markup=False, soft_wrap=True)
err = LastingConsole(stderr=True, highlight=False, markup=False, soft_wrap=True)

ONCE_SECONDS = 5.0
"""Several signals within this time are one interruption."""
DEFAULT_STORE: str = Recipe.model_fields["store"].default

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A built-in recipe's name or the path of a YAML file.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="A.B=VALUE", help="Set one field of the recipe, or all entries of a mapping; repeatable."
    ),
]


def is_there(url: str) -> bool:
    """Return whether there is a store; exit if it does not answer."""
    store = Store(url)
    try:
        store.fs.info(store.root)
    except FileNotFoundError:
        return False
    except Exception as e:
        # Each client of an object store has its own errors: the endpoint is down, or credentials are missing.
        hint = "check the network and the credentials, or name another with --store"
        raise usage_error(f"the store {store.shown} cannot be reached: {type(e).__name__}: {e}; {hint}") from e
    return True


def _existing(url: str) -> str:
    """Return the URL of a store; exit if there is none, because a mistyped bucket looks like an empty store."""
    if not is_there(url):
        hint = "`rlhf run` creates one, in a bucket that exists; name another with --store, or mount it"
        raise usage_error(f"no store at {Store(url).shown}: {hint}")
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
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document (docs/reference/json.md).")]


def print_json(value: Any) -> None:
    """Print a JSON document, the only output; NaN and infinity are null."""
    typer.echo(to_json(value, indent=1, inf_nan_mode="null"))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> None:
    """Print a table; its lines are not wrapped outside of a terminal. `right`: columns of numbers."""
    table = Table(box=None)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = out if out.is_terminal else PlainConsole(highlight=False, markup=False, width=1000)
    console.print(table, soft_wrap=False)


def note(store: Store, what: str, **fields: Any) -> None:
    """Add an entry to the store's history; only warn if it cannot be written."""
    if store.read_only:
        return
    if failed := append(store, what, **fields):
        err.print(f"! not in the history: {failed}")


def interrupt_at_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that the run is recorded as interrupted.

    Only in the main thread: Python allows no others. The first process of a container ignores SIGTERM by default. A job
    manager may send several signals at once: those within ONCE_SECONDS of the first do not interrupt the recording.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    first, warned = -math.inf, False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal first, warned
        now = time.monotonic()
        if now - first > ONCE_SECONDS:
            first, warned = now, False
            raise KeyboardInterrupt
        if not warned:
            warned = True
            # Not through a file object: the signal may have come while it was writing.
            with contextlib.suppress(OSError):
                os.write(2, f"already ending; another signal after {ONCE_SECONDS:.0f} s ends at once\n".encode())

    # A background process of a script keeps ignoring Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)


def usage_error(message: str) -> typer.Exit:
    """Print an error; return the exit with code 2."""
    err.print(f"error: {message}")
    return typer.Exit(2)


def record_of(store: str, name: str | None, node: str | None = None, partial: bool = False) -> dict[str, Any]:
    """Return the run that a name stands for, by default the newest; print its name if it is another one.

    node: prefer runs in which this node is finished. partial: treat runs of a part of a recipe as any other, else
    prefer whole ones.
    """
    found = candidates(Store(store), name)
    found = found if partial else whole_first(found)
    # The newest run may be unfinished, or one whose recipe lacks that node.
    chosen = next((r for r in found if node is None or node in finished_nodes(r)), found[0])
    if chosen["name"] != name:
        err.print(f"run {chosen['name']}")
    return chosen


def named(store: str, name: str | None, node: str) -> tuple[dict[str, Any], str]:
    """Return the run and the node of a policy, by a registered name such as `champion` or a run's name.

    The record then has the promoted artifact in place of the node's.
    """
    entry = current(Store(store), name) if name is not None else None
    if entry is None:
        try:
            return record_of(store, name, node), node
        except UnknownRun as e:
            if name != CHAMPION:
                raise
            raise UnknownRun(f"{e}; no policy has the name {name} yet: `rlhf promote RUN` gives it") from e
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
    """Return the artifact of a run's node; exit if it is not finished or no longer stored."""
    entry = record["nodes"].get(node)
    if entry is not None and entry["state"] == REFUSED:
        raise usage_error(
            f"run {record['name']} has no {node}: its gate has refused the policy ({refusal_of(record)}); "
            f"`rlhf export {record['name']} --force` exports it anyway"
        )
    if entry is None or "digest" not in entry:
        done = ", ".join(name for name, e in record["nodes"].items() if "digest" in e)
        other = f"name another --node: {done}" if done else "no stage is finished yet"
        raise usage_error(f"run {record['name']} has no finished {node}; {other}")
    # By digest: another run may have recomputed the key.
    artifact = store.with_digest(entry["stage"], entry["key"], entry["digest"])
    if artifact is None:
        _, fault = store.examine(entry["stage"], entry["key"])
        state = f"is gone from {store.shown}"
        if fault is not None:
            place, stays = store.address("artifacts", entry["stage"], entry["key"]), f"; {IT_STAYS}"
            state = f"is damaged: {place}: {fault}{stays if store.read_only else ''}"
        raise usage_error(f"{node} of {record['name']} {state}; `rlhf run {record['recipe']['name']}` recomputes it")
    return artifact


def become(module: str, argument: str) -> None:
    """Replace this process with a module (exec), so that signals reach it and no child outlives it."""
    sys.stdout.flush()
    os.execve(sys.executable, interpreter.command(module, argument), worker_environment())

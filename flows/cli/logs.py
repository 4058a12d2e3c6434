"""`rlhf logs`: what the worker of a run has written, all of it, of one stage, or as it comes."""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.shared import RunName, StoreUrl, err, group, record_of, usage_error
from flows.records import log_of, status_of
from stages.store import runs
from stages.store.artifacts import Store

commands = group()

LOG = "worker.log"
POLL_SECONDS = 0.5
STATUS_SECONDS = 2.0
"""Time between two looks at whether a run that is followed goes on."""
BEGUN = re.compile(r"^---- (\S+) \((\S+) [0-9a-f]{12}\) .* ----$")
"""The line with which a worker begins an artifact (`stages.worker.process`): its node, and its stage."""

Node = Annotated[str, typer.Option("--node", help="Of this node alone, or of those that begin so: sft, round-003.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come, until the run ends.")]


@commands.command()
def logs(store: StoreUrl, run_name: RunName = None, node: Node = "", follow: Follow = False) -> None:
    """Show what a run's worker has written: output, warnings, tracebacks, stacks of what was ended."""
    place, record = Store(store), record_of(store, run_name, partial=True)
    path = log_of(place, record["name"])
    try:
        if follow:
            lines: Iterator[str] = _following(place, record, path)
        else:
            lines = iter(_text(place, record, path).splitlines())
        found = _of(lines, node)
        shown = 0
        for line in found:
            typer.echo(line)
            shown += 1
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if node and not shown:
        names = ", ".join(n for n, e in record["nodes"].items() if e["state"] != "hit") or "none"
        raise usage_error(f"the log of run {record['name']} has nothing of {node}: it has made {names}")


def _text(store: Store, record: dict[str, Any], path: Path) -> str:
    """The log as it is: on this machine, or the copy that a finished run leaves in a remote store."""
    if path.exists():
        return path.read_text(errors="replace")
    if not store.is_local:
        try:
            return bytes(store.fs.cat_file(store.join("runs", record["name"], LOG))).decode(errors="replace")
        except FileNotFoundError:
            pass
    raise usage_error(_where(store, record))


def _where(store: Store, record: dict[str, Any]) -> str:
    """Why there is no log here, and where it is."""
    name = record["name"]
    if not any(e["state"] != "hit" for e in record["nodes"].values()):
        return f"run {name} has no log: it has made nothing itself, all was in the store"
    host = record.get("host", "another host")
    place = record.get("log", f"runs/{name}/{LOG} of its scratch folder")
    return (
        f"the log of run {name} is not on this machine: it is {place} on {host}; a copy comes to {store.shown} when "
        "the run ends"
    )


def _following(store: Store, record: dict[str, Any], path: Path) -> Iterator[str]:
    """The lines of a log as they come, until the run has ended."""
    read, rest, looked = 0, "", 0.0
    # A character may be written in two parts.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    running = status_of(record, store) == "running"
    if not path.exists() and (not running or not _is_here(store, record)):
        yield from _text(store, record, path).splitlines()
        return
    while True:
        # Read after the look at the run: what it has written at its end is shown too.
        if running and time.monotonic() - looked > STATUS_SECONDS:
            looked = time.monotonic()
            record = runs.head(store, record["name"]) or record
            running = status_of(record, store) == "running"
        chunk = b""
        if path.exists():
            with path.open("rb") as f:
                f.seek(read)
                chunk = f.read()
        read += len(chunk)
        *lines, rest = (rest + decoder.decode(chunk, final=not running)).split("\n")
        yield from lines
        if not running:
            break
        time.sleep(POLL_SECONDS)
    if rest:
        yield rest
    err.print(f"run {record['name']} {status_of(record, store)}", soft_wrap=True)


def _is_here(store: Store, record: dict[str, Any]) -> bool:
    """Whether a run that is under way will write its log where this machine looks for it."""
    return store.is_local or record.get("log") == str(log_of(store, record["name"]))


def _of(lines: Iterator[str], node: str) -> Iterator[str]:
    """The lines of the nodes that begin with `node`."""
    inside = not node
    for line in lines:
        begun = BEGUN.match(line)
        if begun is not None:
            inside = begun[1].startswith(node)
        if inside:
            yield line

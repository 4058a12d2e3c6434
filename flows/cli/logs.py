"""`rlhf logs`: what the workers of a run have written, all of it, of one stage, or as it comes."""

from __future__ import annotations

import codecs
import contextlib
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.shared import RunName, StoreUrl, err, group, record_of, usage_error
from flows.recipe.workers import ALL, DATA
from flows.records import log_of, status_of
from flows.running.crew import ONLY, log_of_worker
from stages.store import runs
from stages.store.artifacts import Store
from tuning.names import plain

commands = group()

LOG = "worker.log"
POLL_SECONDS = 0.5
STATUS_SECONDS = 2.0
"""Time between two looks at whether a run that is followed goes on."""
BEGUN = re.compile(r"^---- (\S+) \((\S+) [0-9a-f]{12}\) (.*) ----$")
"""The line with which a worker begins an artifact (`stages.worker.process`): its node, its stage, and when."""

Node = Annotated[str, typer.Option("--node", help="Of this node alone, or of those that begin so: sft, round-003.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come, until the run ends.")]


@commands.command()
def logs(store: StoreUrl, run_name: RunName = None, node: Node = "", follow: Follow = False) -> None:
    """Show what a run's worker has written: output, warnings, tracebacks, stacks of what was ended."""
    place, record = Store(store), record_of(store, run_name, partial=True)
    paths = _paths(place, record)
    try:
        found = _following(place, record, paths, node) if follow else _of(_text(place, record, paths), node)
        shown = 0
        for line in found:
            typer.echo(plain(line))
            shown += 1
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if error := record.get("error"):
        err.print(f"run {record['name']} ended with {error}", soft_wrap=True)
    if node and not shown:
        names = ", ".join(n for n, e in record["nodes"].items() if e["state"] != "hit") or "none"
        raise usage_error(f"the log of run {record['name']} has nothing of {node}: it has made {names}")


def _paths(store: Store, record: dict[str, Any]) -> dict[str, Path]:
    """The log of each worker by its name; of a run with one worker under no name."""
    path, workers = log_of(store, record["name"]), record["recipe"].get("workers") or {}
    if not workers:
        return {ONLY: path}
    # On a cluster the data stays with the run unless the recipe names its role.
    names = [n for n in ALL if workers.get(n) is not None or (n == DATA and workers.get("cluster"))]
    return {name: log_of_worker(path, name) for name in names}


def _text(store: Store, record: dict[str, Any], paths: dict[str, Path]) -> Iterator[str]:
    """The lines of the logs, stage after stage as they were begun: on this machine, or the copies that a finished run
    leaves in a remote store."""
    texts = [text for path in paths.values() if (text := _read(store, record["name"], path)) is not None]
    if not texts:
        raise usage_error(_where(store, record))
    parts: list[tuple[str, list[str]]] = []
    for text in texts:
        parts.append(("", []))
        for line in text.splitlines():
            begun = BEGUN.match(line)
            if begun is not None and len(texts) > 1:
                parts.append((begun[3], []))
            parts[-1][1].append(line)
    for _, lines in sorted(parts, key=lambda part: part[0]):
        yield from lines


def _read(store: Store, name: str, path: Path) -> str | None:
    if path.exists():
        return path.read_text(errors="replace")
    if not store.is_local:
        with contextlib.suppress(FileNotFoundError):
            return bytes(store.fs.cat_file(store.join("runs", name, path.name))).decode(errors="replace")
    return None


def _where(store: Store, record: dict[str, Any]) -> str:
    """Why there is no log here, and where it is."""
    name = record["name"]
    if record.get("worker_starts") == 0 or not any(e["state"] != "hit" for e in record["nodes"].values()):
        return (
            f"run {name} has no log: it started no worker; `rlhf show {name}` lists its stages, and the error if one "
            "ended it"
        )
    host = record.get("host", "another host")
    place = record.get("log", f"runs/{name}/{LOG} of its scratch folder")
    if host == socket.gethostname() and record["status"] != "running":
        return f"the log of run {name} was {place}, which is gone"
    return (
        f"the log of run {name} is not on this machine: it is {place} on {host}; a copy comes to {store.shown} when "
        "the run ends"
    )


class _Tail:
    """The lines of a growing log."""

    def __init__(self, path: Path):
        self._path, self._read, self._rest = path, 0, ""
        # A character may be written in two parts.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def new(self, last: bool) -> list[str]:
        """The lines since the last call. last: also one that has no end yet."""
        chunk = b""
        if self._path.exists():
            with self._path.open("rb") as f:
                f.seek(self._read)
                chunk = f.read()
        self._read += len(chunk)
        *lines, self._rest = (self._rest + self._decoder.decode(chunk, final=last)).split("\n")
        return [*lines, self._rest] if last and self._rest else lines


def _following(store: Store, record: dict[str, Any], paths: dict[str, Path], node: str = "") -> Iterator[str]:
    """The lines of the logs as they come, until the run has ended; of several workers with the worker's name."""
    looked = 0.0
    running = status_of(record, store) == "running"
    if not any(path.exists() for path in paths.values()) and (not running or not _is_here(store, record, paths)):
        yield from _of(_text(store, record, paths), node)
        return
    tails = {name: (_Tail(path), _Of(node)) for name, path in paths.items()}
    while True:
        # Read after the look at the run: what it has written at its end is shown too.
        if running and time.monotonic() - looked > STATUS_SECONDS:
            looked = time.monotonic()
            record = runs.head(store, record["name"]) or record
            running = status_of(record, store) == "running"
        for name, (tail, wanted) in tails.items():
            for line in filter(wanted, tail.new(last=not running)):
                yield f"{name:<7}| {line}" if name else line
        if not running:
            break
        time.sleep(POLL_SECONDS)
    err.print(f"run {record['name']} {status_of(record, store)}", soft_wrap=True)


def _is_here(store: Store, record: dict[str, Any], paths: dict[str, Path]) -> bool:
    """Whether a run that is under way will write its logs where this machine looks for them."""
    return store.is_local or record.get("log") in [str(path) for path in paths.values()]


class _Of:
    """Whether lines, asked for one after the other, are of the nodes that begin with `node`."""

    def __init__(self, node: str):
        self._node, self._inside = node, not node

    def __call__(self, line: str) -> bool:
        if (begun := BEGUN.match(line)) is not None:
            self._inside = begun[1].startswith(self._node)
        return self._inside


def _of(lines: Iterator[str], node: str) -> Iterator[str]:
    """The lines of the nodes that begin with `node`."""
    return filter(_Of(node), lines)

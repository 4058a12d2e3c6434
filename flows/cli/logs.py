"""`rlhf logs`: the output of a run's workers, of all stages or one, complete or as it grows."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf.flows.cli.shared import RunName, StoreUrl, app, err, record_of, usage_error
from rlhf.flows.recipe.workers import ALL, DATA
from rlhf.flows.records import log_of, status_of
from rlhf.flows.running.crew import ONLY, log_of_worker
from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import Store
from rlhf.tuning.names import plain

LOG = "worker.log"
POLL_SECONDS = 0.5
STATUS_SECONDS = 2.0
"""Time between two checks of whether a followed run has ended."""
BEGUN = re.compile(r"^---- (\S+) \((\S+) [0-9a-f]{12}\) (.*) ----$")
"""First line of an artifact in a worker's log (`rlhf.stages.worker.process`): node, stage and time."""

Node = Annotated[str, typer.Option("--node", help="Nodes whose names begin so: sft, round-003.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")]


@app.command()
def logs(store: StoreUrl, run_name: RunName = None, node: Node = "", follow: Follow = False) -> None:
    """Show the output of a run's workers: text, warnings, tracebacks, stacks of killed processes."""
    place, record = Store(store), record_of(store, run_name, partial=True)
    paths = _paths(place, record)
    # A running run may write its logs on another machine.
    here = place.is_local or any(str(path) == record.get("log") or path.exists() for path in paths.values())
    running = follow and here and status_of(record, place) == "running"
    tails = {name: _Tail(place, record["name"], path) for name, path in paths.items()}
    if not running and not any(tail.exists() for tail in tails.values()):
        raise usage_error(_where(place, record))
    shown = 0
    try:
        for line in _lines(place, record, tails, node, running):
            typer.echo(plain(line))
            shown += 1
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if error := record.get("error"):
        err.print(f"run {record['name']} ended with {error}")
    if node and not shown:
        names = ", ".join(n for n, e in record["nodes"].items() if e["state"] != "hit") or "none"
        raise usage_error(f"the log of run {record['name']} has nothing of {node}; name another --node: {names}")


def _paths(store: Store, record: dict[str, Any]) -> dict[str, Path]:
    """Return the log of each worker by its name; the only worker has no name."""
    path, workers = log_of(store, record["name"]), record["recipe"].get("workers") or {}
    if not workers:
        return {ONLY: path}
    # On a cluster the data role stays with the run unless the recipe names it.
    names = [n for n in ALL if workers.get(n) is not None or (n == DATA and workers.get("cluster"))]
    return {name: log_of_worker(path, name) for name in names}


def _where(store: Store, record: dict[str, Any]) -> str:
    """Explain why there is no log here."""
    name, host = record["name"], record.get("host", "another host")
    if record.get("worker_starts") == 0 or not any(e["state"] != "hit" for e in record["nodes"].values()):
        return f"run {name} has no log: it started no worker; type `rlhf show {name}`"
    place = record.get("log", f"runs/{name}/{LOG} of its scratch folder")
    if host == socket.gethostname() and record["status"] != "running":
        return f"the log of run {name} was {place}, which is gone; type `rlhf show {name}`"
    return (
        f"the log of run {name} is {place} on {host}; type `rlhf logs {name}` there, or here after the end of the run, "
        f"which copies it to {store.shown}"
    )


class _Tail:
    """Lines of a growing log on this machine, or of a finished run's copy in a remote store."""

    def __init__(self, store: Store, run: str, path: Path):
        self._store, self._path, self._copy = store, path, store.join("runs", run, path.name)
        self._read, self._rest = 0, b""

    def exists(self) -> bool:
        return self._path.exists() or self._store.fs.exists(self._copy)

    def new(self, last: bool) -> list[str]:
        """Return the lines since the last call. last: also an unfinished one."""
        chunk = b""
        source = self._path.open if self._path.exists() else functools.partial(self._store.fs.open, self._copy)
        with contextlib.suppress(FileNotFoundError), source("rb") as f:
            f.seek(self._read)
            chunk = f.read()
        self._read += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line.decode(errors="replace") for line in ([*lines, self._rest] if last and self._rest else lines)]


def _lines(
    store: Store, record: dict[str, Any], tails: dict[str, _Tail], node: str = "", running: bool = False
) -> Iterator[str]:
    """Yield the lines of the logs, with the names of several workers; of a running run until it ends."""
    follow, looked = running, 0.0
    inside = dict.fromkeys(tails, not node)
    while True:
        # Check the run before reading: its last lines are shown too.
        if running and time.monotonic() - looked > STATUS_SECONDS:
            looked = time.monotonic()
            record = runs.head(store, record["name"]) or record
            running = status_of(record, store) == "running"
        for name, tail in tails.items():
            for line in tail.new(last=not running):
                if begun := BEGUN.match(line):
                    inside[name] = begun[1].startswith(node)
                if inside[name]:
                    yield f"{name:<7}| {line}" if name else line
        if not running:
            break
        time.sleep(POLL_SECONDS)
    if follow:
        err.print(f"run {record['name']} {status_of(record, store)}")

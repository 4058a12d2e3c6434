"""Commands about a store over many runs: its history, metrics and pages."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf.flows.cli.shared import AsJson, StoreUrl, app, err, out, print_json, usage_error
from rlhf.flows.report.formats import when
from rlhf.stages.store.artifacts import Store


@app.command()
def history(
    store: StoreUrl,
    most: Annotated[int, typer.Option("--most", min=1, help="Newest changes to show.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List changes of the store with user, time, command and commit; the newest comes last."""
    from rlhf.stages.store.audit_log import events

    place = Store(store)
    found = events(place, most)
    if as_json:
        print_json({"store": place.shown, "events": found})
        return
    for event in found:
        out.print(_line(event))
    if len(found) == most:
        out.print(f"the newest {most}; --most shows more")


@app.command()
def metrics(
    store: StoreUrl,
    to: Annotated[
        Path | None, typer.Option("--to", help="Write this file in one step, for node_exporter's textfile collector.")
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option("--serve", metavar="[HOST:]PORT", help="Answer scrapes until Ctrl-C; HOST is 127.0.0.1."),
    ] = None,
) -> None:
    """Print the state of a store as Prometheus metrics: runs, scores, seconds, hits, speed, bytes, age."""
    from prometheus_client import generate_latest, start_http_server, write_to_textfile

    from rlhf.flows.report.prometheus import registry_of

    place = Store(store)
    found = registry_of(place)
    if to is not None:
        try:
            # Atomic.
            write_to_textfile(str(to), found)
        except OSError as e:
            raise usage_error(f"--to {to}: {e.strerror}; name a file in a folder that this user may write to") from e
    if serve is None:
        if to is None:
            typer.echo(generate_latest(found), nl=False)
        return
    host, _, port = serve.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) < 2**16:
        raise usage_error(f"--serve {serve}: expected PORT or HOST:PORT, such as 127.0.0.1:9109")
    try:
        server, thread = start_http_server(int(port), host := host or "127.0.0.1", found)
    except OSError as e:
        raise usage_error(f"--serve {serve}: {e}; choose another port") from e
    err.print(f"metrics of {place.shown} on http://{host}:{server.server_port}/metrics")
    with contextlib.suppress(KeyboardInterrupt):
        thread.join()
    server.shutdown()


@app.command()
def ui(
    store: StoreUrl,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of 127.0.0.1; 0: any free one.")] = 8270,
) -> None:
    """Show a store in this machine's browser until Ctrl-C: runs as they go, comparisons, sweeps, lineage.

    The pages only read, and answer every user of this machine and nobody else. From another machine type
    `ssh -L 8270:127.0.0.1:8270 HOST`.
    """
    from rlhf.flows.report.ui import make_app
    from rlhf.stages.serving.web import Web

    place = Store(store)
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as e:
        raise usage_error(f"--port {port}: {e.strerror}; choose another port") from e
    err.print(f"runs of {place.shown} on http://127.0.0.1:{listener.getsockname()[1]}")
    with listener, contextlib.suppress(KeyboardInterrupt):
        Web(make_app(place), "127.0.0.1", port).run(sockets=[listener])


@app.command()
def mcp(store: StoreUrl) -> None:
    """Answer an agent's questions about a store by the Model Context Protocol, over standard input and output.

    For example: `claude mcp add rlhf -- rlhf mcp --store STORE`. The tools only read.
    """
    from rlhf.flows.mcp_server import make_server

    try:
        server = make_server(store)
    except ImportError as e:
        raise usage_error(str(e)) from e
    server.run("stdio")


def _line(event: dict[str, Any]) -> str:
    """`2026-11-24 10:00:00 UTC  user@host  run  smoke-x  finished  0123456789 (dirty)  rlhf run smoke`."""
    commit, forced, run = (event.get("commit") or "")[:10], event.get("forced"), event.get("run")
    parts = [
        when(event["at"]),
        event.get("by"),
        event.get("what"),
        run if isinstance(run, str) else "",
        event.get("outcome") or event.get("state"),
        f"forced {', '.join(forced)}" if isinstance(forced, list) and forced else "forced" if forced else "",
        f"{commit} (dirty)" if commit and event.get("dirty") else commit,
        event.get("command"),
    ]
    return "  ".join(str(part) for part in parts if part)

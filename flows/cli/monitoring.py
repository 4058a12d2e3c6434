"""Commands that watch a store over many runs: its trail and metrics."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf.flows.cli.shared import AsJson, StoreUrl, err, group, out, print_json, usage_error
from rlhf.flows.report.formats import when
from rlhf.stages.store.artifacts import Store

commands = group()


@commands.command()
def history(
    store: StoreUrl,
    most: Annotated[int, typer.Option("--most", min=1, help="Changes shown, the newest ones.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List what has changed the store: who, when, which command, with which commit. The newest comes last."""
    from rlhf.stages.store.audit_log import events

    place = Store(store)
    # One more, which tells whether there are others.
    found = events(place, most + 1)
    if as_json:
        print_json({"store": place.shown, "events": found[-most:]})
        return
    for event in found[-most:]:
        out.print(_line(event))
    if len(found) > most:
        out.print(f"the newest {most}; --most shows more")


@commands.command()
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
    """Print the state of a store as Prometheus metrics: runs, seconds, hits, speed, bytes, waits, age."""
    from prometheus_client import generate_latest, start_http_server, write_to_textfile

    from rlhf.flows.report.prometheus import registry_of

    place = Store(store)
    found = registry_of(place)
    if to is not None:
        # A reader sees the old file or the new one.
        write_to_textfile(str(to), found)
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
        raise usage_error(f"--serve {serve}: {e}") from e
    err.print(f"metrics of {place.shown} on http://{host}:{server.server_port}/metrics")
    with contextlib.suppress(KeyboardInterrupt):
        thread.join()
    server.shutdown()


def _line(event: dict[str, Any]) -> str:
    """`2026-11-24 10:00:00 UTC  user@host  run  smoke-x  finished  0123456789 (dirty)  rlhf run smoke`."""
    commit = (event.get("commit") or "")[:10]
    forced = event.get("forced")
    parts = [
        when(event["at"]),
        str(event.get("by", "")),
        str(event.get("what", "")),
        str(event.get("run") or "") if isinstance(event.get("run"), str) else "",
        str(event.get("outcome") or event.get("state") or ""),
        "" if not forced else f"forced {', '.join(forced)}" if isinstance(forced, list) else "forced",
        f"{commit} (dirty)" if commit and event.get("dirty") else commit,
        str(event.get("command", "")),
    ]
    return "  ".join(part for part in parts if part)

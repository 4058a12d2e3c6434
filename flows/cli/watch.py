"""Commands that watch a store over many runs: its trail, trends and metrics."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.shared import AsJson, StoreUrl, err, group, out, print_json, usage_error
from flows.report.formats import when
from stages.store.artifacts import Store
from tuning.atomic import whole_file

commands = group()


@commands.command()
def history(
    store: StoreUrl,
    most: Annotated[int, typer.Option("--most", min=1, help="Changes shown, the newest ones.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List what has changed the store: who, when, which command, with which commit. The newest comes last."""
    from stages.store.trail import events

    place = Store(store)
    # One more, which tells whether there are others.
    found = events(place, most + 1)
    if as_json:
        print_json({"store": place.shown, "events": found[-most:]})
        return
    for event in found[-most:]:
        out.print(_line(event), soft_wrap=True)
    if len(found) > most:
        out.print(f"the newest {most}; --most shows more")


@commands.command()
def trends(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="The name of a recipe.")],
    store: StoreUrl,
    to: Annotated[Path | None, typer.Option("--to", help="Write this file, and nothing to the store.")] = None,
) -> None:
    """Write one HTML page over all runs of a recipe: scores, KL, length, seconds, bytes. Prints where it is."""
    from flows.report.trends import render, write_trends

    try:
        if to is None:
            out.print(write_trends(Store(store), recipe), soft_wrap=True)
        else:
            to.write_text(render(Store(store), recipe), encoding="utf-8", errors="replace")
            out.print(str(to), soft_wrap=True)
    except ValueError as e:
        raise usage_error(str(e)) from e


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
    from flows.report.prometheus import serve_metrics, text_of

    place = Store(store)
    if serve is not None:
        host, _, port = serve.rpartition(":")
        if not port.isdecimal() or not 0 <= int(port) < 2**16:
            raise usage_error(f"--serve {serve}: expected PORT or HOST:PORT, such as 127.0.0.1:9109")
        try:
            server = serve_metrics(place, host or "127.0.0.1", int(port))
        except OSError as e:
            raise usage_error(f"--serve {serve}: {e}") from e
        err.print(f"metrics of {place.shown} on http://{server.host}:{server.port}/metrics", soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.wait()
        server.stop()
        return
    text = text_of(place)
    if to is None:
        typer.echo(text, nl=False)
        return
    # A reader sees the old file or the new one.
    with whole_file(to) as partial:
        partial.write_text(text, encoding="utf-8")


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

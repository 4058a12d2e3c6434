"""Commands that watch a store over many runs: its trail."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flows.cli.shared import AsJson, StoreUrl, group, out, print_json
from flows.report.formats import when
from stages.store.artifacts import Store

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
    found = events(place)
    if as_json:
        print_json({"store": place.shown, "events": found[-most:]})
        return
    for event in found[-most:]:
        out.print(_line(event), soft_wrap=True)
    if len(found) > most:
        out.print(f"the newest {most} of {len(found)}; --most shows more")


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

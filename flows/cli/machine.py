"""Commands about the machine."""

from __future__ import annotations

import subprocess

import typer

from rlhf.flows.cli.shared import AsJson, app
from rlhf.stages.worker import interpreter


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show the device, the defaults that follow, and the versions of libraries."""
    options = ["--json"] if as_json else []
    raise typer.Exit(subprocess.call(interpreter.command("rlhf.stages.tools.doctor", *options)))

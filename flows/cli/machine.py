"""Commands about the machine."""

from __future__ import annotations

import subprocess

import typer

from flows.cli.shared import group
from stages.worker import interpreter

commands = group()


@commands.command()
def doctor() -> None:
    """Show the device, what it decides for a recipe, and the versions in use."""
    raise typer.Exit(subprocess.call(interpreter.command("stages.tools.doctor")))

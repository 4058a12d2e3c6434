"""The command line: `rlhf`. A command is a function in the module of its group.

Nothing here loads JAX: programs that need it run in processes of their own. Modules that some commands do not need
are imported inside the others, because start-up is most of the time that `rlhf plan` and `rlhf show` take: Prefect
alone costs two seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from rlhf.flows.cli import (
    audit,
    derive,
    episodes,
    fit,
    gc,
    inspect_store,
    logs,
    machine,
    monitoring,
    policy,
    promote,
    run,
    settings,
)
from rlhf.flows.cli.shared import usage_error
from rlhf.flows.orchestration.exit import leave
from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.records import UnknownRun
from rlhf.stages.serving.access import AccessError
from rlhf.stages.store.artifacts import ArtifactError
from rlhf.stages.store.disk import disk_fault
from rlhf.stages.store.readonly import ReadOnlyStore
from rlhf.stages.store.registry import RegistryError
from rlhf.stages.worker.interpreter import add_current_folder, escape_output


class Commands(TyperGroup):
    """All commands, with the errors that are of what the user has asked for."""

    def invoke(self, ctx: Any) -> Any:
        """As `TyperGroup.invoke`; exit code 2 for such an error."""
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
for module in (
    run,
    derive,
    settings,
    fit,
    inspect_store,
    logs,
    monitoring,
    audit,
    gc,
    episodes,
    policy,
    promote,
    machine,
):
    app.add_typer(module.commands)


def main() -> None:
    """Entry point of the console script."""
    # A user's `module:function` may be in the current folder.
    add_current_folder()
    escape_output()
    try:
        app()
    except BaseException as e:
        if isinstance(e, Exception) and (fault := disk_fault(e, Path())):
            sys.exit(f"failed: {fault.strerror}")
        leave(e)


if __name__ == "__main__":
    main()

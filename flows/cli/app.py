"""The command line: `rlhf`. A command is a function in the module of its group.

Nothing here loads JAX: programs that need it run in processes of their own. Modules that some commands do not need
are imported inside the others, because start-up is most of the time that `rlhf plan` and `rlhf show` take: Prefect
alone costs two seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from flows.cli import audit, change, episodes, fit, gc, logs, look, machine, policy, promote, run, settings, watch
from flows.cli.shared import usage_error
from flows.orchestration.leaving import leave
from stages.store.artifacts import ArtifactError
from stages.store.disk import disk_fault
from stages.store.readonly import ReadOnlyStore
from stages.worker.interpreter import add_current_folder, escape_output

app = typer.Typer(
    help="Post-training as explicit, cached, resumable stages: data, SFT, reward model, RL rounds, evaluation, export.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for module in (run, change, settings, fit, look, logs, watch, audit, gc, episodes, policy, promote, machine):
    app.add_typer(module.commands)


def main() -> None:
    """Entry point of the console script."""
    # A user's `module:function` may be in the current folder.
    add_current_folder()
    escape_output()
    try:
        app()
    except (ArtifactError, ReadOnlyStore) as e:
        sys.exit(usage_error(str(e)).exit_code)
    except BaseException as e:
        if isinstance(e, Exception) and (fault := disk_fault(e, Path())):
            sys.exit(f"failed: {fault.strerror}")
        leave(e)


if __name__ == "__main__":
    main()

"""The command line `rlhf`. A command is a function in the module of its group.

Nothing here loads JAX: programs that need it run in their own processes. Commands import rarely needed modules
inside functions, because start-up is most of the time of `rlhf plan` and `rlhf show`: Prefect alone takes two seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf.flows.cli import (  # noqa: F401
    audit,
    datasets,
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
    sweep,
)
from rlhf.flows.cli.shared import app
from rlhf.flows.orchestration.exit import leave
from rlhf.stages.store.disk import disk_fault
from rlhf.stages.store.keys import without_userinfo
from rlhf.stages.store.transfers import is_unreachable
from rlhf.stages.worker.interpreter import add_current_folder, escape_output


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
        if isinstance(e, Exception) and is_unreachable(e):
            text = without_userinfo(f"failed: {type(e).__name__}: {e}")
            e = SystemExit(f"{text}; check the network and the credentials, and repeat the command")
        leave(e)


if __name__ == "__main__":
    main()

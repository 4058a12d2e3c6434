"""Starts a run, with Prefect or without, and turns its errors into messages and exit codes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from rlhf.flows.cli.shared import err, interrupt_at_sigterm
from rlhf.flows.recipe.model import Recipe
from rlhf.flows.records import REFUSED

if TYPE_CHECKING:
    from rlhf.flows.graph.policy_refs import Standing
    from rlhf.stages.worker.client import StageFailed, WorkerDied

GATE = 3
"""The exit status of a run whose gate has refused its policy: all of it was done, and nothing is promoted."""

# Prefect's own lines stay out of the terminal; its log of the run has them.
QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
}


def launch(
    recipe: Recipe,
    no_prefect: bool,
    *,
    name: str | None = None,
    force: set[str] | None = None,
    only: set[str] | None = None,
    standing: Standing | None = None,
    wait: bool = False,
) -> None:
    """Runs a recipe. Exits with 3 where its gate refuses the policy, 2 for a usage error, 1 for a failed stage or
    store, 130 after Ctrl-C; without Prefect, which has an end of its own for it, also after SIGTERM.

    wait: for the end of a run of this name that another process has at work.
    """
    from rlhf.flows.running.naming import before, wait_until_ended
    from rlhf.flows.running.plain import run_plain
    from rlhf.flows.running.session import RunTooLong
    from rlhf.stages.store.artifacts import ArtifactError, Store
    from rlhf.stages.store.disk import disk_fault
    from rlhf.stages.store.readonly import refuse
    from rlhf.stages.store.registry import RegistryError
    from rlhf.stages.worker.client import StageFailed, WorkerDied

    refuse(recipe.store)
    if no_prefect:
        interrupt_at_sigterm()
    try:
        if wait and name is not None:
            wait_until_ended(Store(recipe.store), name, lambda line: err.print(line))
        # Here too: Prefect takes seconds to start.
        if name is not None and (begun := before(Store(recipe.store), recipe, name)) is not None:
            err.print(f"run {name} goes on (try {begun.get('tries', 1) + 1}): what is finished is reused")
        run = run_plain if no_prefect else run_with_prefect
        status = run(recipe, name=name, force=force, only=only, standing=standing)
    except (ArtifactError, RegistryError, RunTooLong) as e:
        err.print(f"failed: {e}")
        raise typer.Exit(1) from e
    except (StageFailed, WorkerDied, OSError) as e:
        said = str(e)
        if isinstance(e, OSError):
            full = disk_fault(e, Store(recipe.store).scratch)
            said = f"{type(e).__name__}: {e}" if full is None else str(full.strerror)
        err.print(f"failed: {said}\nwhat is finished is kept{_advice(e)}")
        raise typer.Exit(1) from e
    except KeyboardInterrupt as e:
        err.print(f"{str(e) or 'interrupted'}; what is finished is kept, the same command goes on from there")
        raise typer.Exit(130) from e
    if status == REFUSED:
        raise typer.Exit(GATE)


def _advice(error: StageFailed | WorkerDied | OSError) -> str:
    """Advise after a failure of a stage, or of the store or a disk: not what would fail in the same way again."""
    from rlhf.stages.worker.client import CodeChanged, StageOutage, WorkerDied

    if isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
        return "; make the path writable or mount it, or name another store (--store), and run again"
    if isinstance(error, WorkerDied | StageOutage | CodeChanged | OSError):
        return "; the same command goes on from there"
    return " and reused: change what the message names, in the recipe, the data or the code, and run again"


def run_with_prefect(
    recipe: Recipe,
    *,
    name: str | None,
    force: set[str] | None,
    only: set[str] | None,
    standing: Standing | None = None,
) -> str:
    """Runs the flow in this process, on the server that Prefect is set to or else on a private one.

    A private server ends with the run. Returns the run's status.
    """
    for setting, value in QUIET.items():
        # What the user has set stays.
        os.environ.setdefault(setting, value)
    from httpx import TransportError

    from rlhf.flows.orchestration.server import PrivateServer, ServerFailed, may_be_set, reach_directly

    # Starting a server takes longest, and asking Prefect for its settings means to import it for two seconds: without
    # a sign of such settings the server starts first and comes up during the import.
    server = None if may_be_set() else PrivateServer()
    try:
        from prefect.context import refresh_global_settings_context
        from prefect.settings import get_current_settings

        private = get_current_settings().api.url is None
        if private:
            server = server or PrivateServer()
            os.environ |= {"PREFECT_API_URL": server.url, "PREFECT_API_AUTH_STRING": server.auth}
            reach_directly()
            refresh_global_settings_context()
        from rlhf.flows.orchestration.cancellation import BEGIN_SECONDS, asked
        from rlhf.flows.pipeline import run_recipe

        if private and server:
            server.wait()
        # Before anything is made: Prefect tries for minutes before it says that nobody is there.
        elif (error := asked(BEGIN_SECONDS)) is not None:
            raise error
        return run_recipe(recipe, name=name, force=force, only=only, standing=standing)
    except ServerFailed as e:
        raise SystemExit(f"failed: {e}") from None
    except TransportError as e:
        url = get_current_settings().api.url
        raise SystemExit(
            f"failed: the Prefect server at {url} cannot be reached ({str(e) or type(e).__name__})\n"
            "what is finished is kept; start the server, or run with --no-prefect, and the same command goes on"
        ) from None
    finally:
        if server:
            # What this process does next must not use the address of a server that has ended.
            for setting in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING"):
                os.environ.pop(setting, None)
            server.stop()

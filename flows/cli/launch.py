"""Start a run, with or without Prefect, and turn its errors into messages and exit codes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from rlhf.flows.cli.shared import err, interrupt_at_sigterm
from rlhf.flows.recipe.model import Recipe
from rlhf.flows.records import REFUSED, find_run

if TYPE_CHECKING:
    from rlhf.flows.graph.policy_refs import Standing
    from rlhf.stages.worker.client import StageFailed, WorkerDied

GATE = 3
"""Exit status of a run that the gate refused: it is complete, and nothing is promoted."""

# Prefect's log of the run has its lines; the terminal has only ours.
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
    """Run a recipe. Exits with 3 after a refusal of the gate, 2 after a usage error, 1 after a failed stage or store,
    130 after Ctrl-C; without Prefect also after SIGTERM.

    wait: first wait for the end of a run of this name in another process.
    """
    from rlhf.flows.running.naming import before, wait_until_ended
    from rlhf.flows.running.runner import run_plain
    from rlhf.flows.running.session import RunTooLong
    from rlhf.flows.running.sharing import line_start
    from rlhf.stages.store.artifacts import ArtifactError, Store
    from rlhf.stages.store.disk import disk_fault
    from rlhf.stages.store.readonly import refuse
    from rlhf.stages.store.registry import RegistryError
    from rlhf.stages.worker.client import StageFailed, WorkerDied

    refuse(Store(recipe.store))
    start = line_start(name)
    # Prefect handles SIGTERM itself.
    if no_prefect:
        interrupt_at_sigterm()
    try:
        if wait and name is not None:
            wait_until_ended(Store(recipe.store), name, lambda line: err.print(line))
        # Early: Prefect takes seconds to start.
        if name is not None and (begun := before(Store(recipe.store), recipe, name)) is not None:
            err.print(f"run {name} continues (try {begun.get('tries', 1) + 1}); finished stages are reused")
        plain = no_prefect or not (force or only or standing) and _is_cached(recipe)
        if plain and not no_prefect:
            interrupt_at_sigterm()
        with contextlib.nullcontext() if plain else prefect_flow() as run:
            status = (run or run_plain)(recipe, name=name, force=force, only=only, standing=standing)
    except (ArtifactError, RegistryError, RunTooLong) as e:
        err.print(f"{start}failed: {e}")
        raise typer.Exit(1) from e
    except (StageFailed, WorkerDied, OSError) as e:
        text = str(e)
        if isinstance(e, OSError):
            full = disk_fault(e, Store(recipe.store).scratch)
            text = f"{type(e).__name__}: {e}" if full is None else str(full.strerror)
        err.print(f"{start}failed: {text}\nfinished stages are kept{_advice(e)}")
        raise typer.Exit(1) from e
    except KeyboardInterrupt as e:
        err.print(f"{start}{str(e) or 'interrupted'}; finished stages are kept; the same command continues")
        raise typer.Exit(130) from e
    if status == REFUSED:
        raise typer.Exit(GATE)


def _is_cached(recipe: Recipe) -> bool:
    """Return whether a private Prefect server would see cached stages alone; it takes ten seconds to start and end."""
    from rlhf.flows.graph.plan import plan
    from rlhf.flows.orchestration.server import may_be_set

    return not may_be_set() and all(planned.state == "hit" for planned in plan(recipe))


def recompute(
    recipe: Recipe, nodes: set[str], standing: Standing, no_prefect: bool, force: set[str] | None = None
) -> dict[str, Any]:
    """Run nodes of a recipe and their missing inputs under a new name; return the record."""
    from rlhf.flows.graph.build import build, with_inputs
    from rlhf.flows.running.naming import free_name
    from rlhf.stages.store.artifacts import Store

    store = Store(recipe.store)
    name = free_name(store, recipe.name)
    only = with_inputs({n.name: n for n in build(recipe, standing)}, nodes)
    launch(recipe, no_prefect, name=name, force=force, only=only, standing=standing)
    return find_run(store, name)


def _advice(error: StageFailed | WorkerDied | OSError) -> str:
    """Advise after a failure; do not suggest a command that would fail again."""
    from rlhf.stages.worker.client import CodeChanged, StageOutage, WorkerDied

    if isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
        return "; make the path writable or mount it, or name another store (--store), and run again"
    if isinstance(error, WorkerDied | StageOutage | CodeChanged | OSError):
        return "; the same command continues"
    return " and reused: change what the message names, in the recipe, the data or the code, and run again"


@contextlib.contextmanager
def prefect_flow(*tags: str) -> Iterator[Callable[..., str]]:
    """Give a function that runs the flow in this process and returns the run's status.

    The server is Prefect's configured one, else a private one that ends with the block. A block within it has the same
    server and tags.
    """
    for setting, value in QUIET.items():
        # Keep the user's settings.
        os.environ.setdefault(setting, value)
    from httpx import TransportError

    from rlhf.flows.orchestration.server import PrivateServer, ServerFailed, may_be_set, reach_directly

    # Only Prefect's import, of two seconds, tells whether a server is configured. Without a sign of one, start the
    # private server first: it comes up during the import.
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
        from prefect import tags as tagged

        from rlhf.flows.orchestration.cancellation import BEGIN_SECONDS, answer_error
        from rlhf.flows.pipeline import run_recipe

        if private and server:
            server.wait()
        # Early: Prefect would try for minutes before it reports a missing server.
        elif (error := answer_error(BEGIN_SECONDS)) is not None:
            raise error
        with tagged(*tags):
            yield run_recipe
    except ServerFailed as e:
        raise SystemExit(f"failed: {e}") from None
    except TransportError as e:
        url = get_current_settings().api.url
        raise SystemExit(
            f"failed: the Prefect server at {url} cannot be reached ({str(e) or type(e).__name__})\n"
            "finished stages are kept; start the server, or add --no-prefect: the same command continues"
        ) from None
    finally:
        if server:
            # The address of the ended server must not be used.
            for setting in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING"):
                os.environ.pop(setting, None)
            server.stop()

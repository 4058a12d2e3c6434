"""The connection of a run to its Ray cluster, and the code that travels to its nodes.

That code is this project's stages and the user's own modules, as a zip file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.stages.common.xla_flags import SHARED_GPU
from rlhf.stages.store.artifacts import Store
from rlhf.stages.worker.interpreter import PROJECT
from rlhf.tuning.allowed import RULES

PACKAGES = ("rlhf/stages", "rlhf/tuning")
LARGEST = 64 << 20
"""Bytes of source beyond which something other than code lies in the current folder."""


def write_package(path: Path, folder: Path) -> None:
    """Writes the package of this project and of the modules in `folder`; equal content gives equal bytes.

    Raises ValueError where the modules are too large.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as package:
        for name, file in sorted(_files(folder)):
            # Without the time and owner of the file.
            package.writestr(zipfile.ZipInfo(name), file.read_bytes(), zipfile.ZIP_DEFLATED)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    # Else Python would prefer a `rlhf` that is installed on the node.
    yield "rlhf/__init__.py", PROJECT / "rlhf" / "__init__.py"
    for name in PACKAGES:
        for file in (PROJECT / name).rglob("*"):
            if file.is_file() and not _is_left_out(file.relative_to(PROJECT)):
                yield file.relative_to(PROJECT).as_posix(), file
    total = 0
    for file in _user_files(folder):
        total += file.stat().st_size
        if total > LARGEST:
            raise ValueError(
                f"{folder} has more than {LARGEST >> 20} MiB of Python modules, which travel to the cluster's nodes: "
                "start the run in a folder with its modules only"
            )
        yield file.relative_to(folder).as_posix(), file


def _user_files(folder: Path) -> Iterator[Path]:
    """Yield the sources of modules that Python would import from the folder, not of names that other modules have."""
    for entry in sorted(folder.iterdir()):
        name = entry.stem if entry.suffix == ".py" else entry.name
        known = not name.isidentifier() or name == "rlhf" or name in sys.stdlib_module_names
        if known or (entry / "pyvenv.cfg").exists():
            continue
        files = [entry] if entry.suffix == ".py" else sorted(entry.rglob("*.py"))
        if files and _is_imported_from(folder, name):
            yield from (file for file in files if not _is_left_out(file.relative_to(folder)))


def _is_imported_from(folder: Path, name: str) -> bool:
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
    places = [*(spec.submodule_search_locations or []), spec.origin] if spec is not None else []
    return any(place and Path(place).absolute().is_relative_to(folder) for place in places)


def _is_left_out(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


AUTH_MODE = "RAY_AUTH_MODE"
ADDRESS, RUNTIME_ENV = "RLHF_CLUSTER", "RLHF_CLUSTER_RUNTIME_ENV"
"""Variables by which workers spread requests over the cluster (`rlhf.tuning.parallel`)."""
LOOPBACK_NODES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
LOOPBACK = ("127.0.0.1", "localhost")
"""Names of the one address at which Ray listens on loopback alone: at 127.0.0.2 it listens at all addresses."""
CONNECT_SECONDS = 10.0
"""For the head of the cluster to accept a connection; Ray itself tries for minutes."""


class Cluster:
    """The connection of a run to its cluster."""

    def __init__(self, recipe: Recipe, run: str):
        """Connects. Raises RecipeError, with the remedy, where that fails."""
        assert recipe.workers is not None and recipe.workers.cluster is not None
        self.address, self.recipe, self.run = recipe.workers.cluster, recipe, run
        self.store = Store(recipe.store)
        self._folder = tempfile.TemporaryDirectory(prefix="rlhf-cluster-")
        if self.address.rpartition(":")[0] in LOOPBACK:
            # Else Ray takes the address of a network interface in place of the loopback address.
            os.environ.setdefault(LOOPBACK_NODES, "0")
        else:
            # By default Ray decides by whether it finds a token.
            os.environ.setdefault(AUTH_MODE, "token")
        try:
            import ray
            from ray._private import worker as ray_worker
        except ImportError:
            raise RecipeError("workers.cluster needs Ray: pip install 'rlhf-pipeline[ray]'") from None
        with _own_signal_handlers():
            try:
                if self.address != "auto":
                    host, _, port = self.address.rpartition(":")
                    socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
                ray.init(
                    self.address,
                    namespace=run,
                    runtime_env={"working_dir": str(self._package())},
                    log_to_driver=False,
                    configure_logging=False,
                )
                # Ray has no setting for the screen of internals that it prints of a lost node.
                ray_worker.print_to_stdstream = lambda *_, **__: None
            except Exception as e:
                raise RecipeError(_not_connected(self.address, e)) from e
        self.gcs = str(ray.get_runtime_context().gcs_address)

    def _package(self) -> Path:
        path = Path(self._folder.name) / "code.zip"
        try:
            write_package(path, Path.cwd())
        except ValueError as e:
            raise RecipeError(f"workers.cluster: {e}") from e
        return path

    def runtime_env(self) -> dict[str, Any]:
        """Ray's `runtime_env` with the code as it is now, which a fresh worker loads."""
        # The public way is `ray.init`, once a run.
        from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

        return upload_working_dir_if_needed({"working_dir": str(self._package())}, include_gitignore=False)

    def variables(self, runtime_env: dict[str, Any]) -> dict[str, str]:
        """The environment of workers that spread requests over the cluster."""
        rules = {name: os.environ[name] for name in RULES if name in os.environ}
        return {ADDRESS: self.gcs, RUNTIME_ENV: json.dumps(runtime_env)} | rules | shared_memory(self.recipe)

    def close(self) -> None:
        """Disconnects: Ray ends what is left of the run's actors."""
        import ray

        with _own_signal_handlers(), contextlib.suppress(Exception):
            ray.shutdown()
        self._folder.cleanup()


def shared_memory(recipe: Recipe) -> dict[str, str]:
    """Return the variables of workers whose GPUs are also those of servers that sleep; a user's own values stay."""
    if recipe.rl is None or not recipe.rl.rollout.engine.sleep:
        return {}
    return {name: value for name, value in SHARED_GPU.items() if name not in os.environ}


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keeps the handlers of SIGTERM and SIGINT, which Ray replaces, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _not_connected(address: str, error: Exception) -> str:
    from ray.exceptions import AuthenticationError

    if isinstance(error, AuthenticationError):
        return (
            f"workers.cluster: {address} was not reached with token authentication ({error}). Generate a token once "
            "(`ray get-auth-token --generate`), copy it to ~/.ray/auth_token or RAY_AUTH_TOKEN of every host, and "
            "start Ray there with RAY_AUTH_MODE=token"
        )
    return (
        f"workers.cluster: no connection to Ray at {address} ({type(error).__name__}: {error}). The run's own host has "
        "to be a node of the cluster: `ray status` shows it, `ray start --address=HOST:PORT` joins it"
    )

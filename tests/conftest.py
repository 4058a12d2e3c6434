"""Fixtures of several rooms: the command line as a process, one smoke run that is made once, an S3 server."""

import fcntl
import gc
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sockets import LISTENERS, listeners
from tests.support import QUICK, RLHF

os.environ.setdefault("XLA_FLAGS", QUICK)
# Tests start many processes, each of which would compile what it imports again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_configure(config: pytest.Config) -> None:
    """Tests of the core share compiled programs too: JAX reads these when it loads."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder = str(config.cache.mkdir("jax"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
    if "jax" in sys.modules:
        # The `conftest.py` of a folder that the command line names has loaded it already.
        import jax

        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays to the end: Python's collector would walk it again and again.

    What JAX traces and compiles stays too, in many small objects: at Python's own thresholds it walks those for a
    twentieth of the time of tests that compile.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 10, 10)
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first file that reads the smoke run begins, and makes it; the others come last: they would wait for it."""
    reads = {item.path for item in items if "smoke_store" in getattr(item, "fixturenames", ())}
    first = next((item.path for item in items if item.path in reads), None)
    items.sort(key=lambda item: 0 if item.path == first else 2 if item.path in reads else 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files go to workers whole, and those of a served model together: each worker would train and compile it."""
    from xdist.scheduler import LoadFileScheduling

    class ByFixtures(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            served = "tests/stages/serving/"
            return served if nodeid.startswith(served) else str(super()._split_scope(nodeid))

    return ByFixtures(config, log)


def pytest_collection_finish() -> None:
    """Programs are lowered in one MLIR context: JAX makes one for each, which takes 4 ms and is kept with its program.

    Of the main thread alone: what other threads lower and compile meets nobody.
    """
    if "jax" not in sys.modules:
        return
    from jax._src.interpreters import mlir

    make, kept = getattr(mlir, "make_ir_context", None), []
    if make is None:
        # A version of JAX that has it elsewhere.
        return

    def make_once() -> Any:
        if threading.current_thread() is not threading.main_thread():
            return make()
        if not kept:
            kept.append(make())
        return kept[0]

    mlir.make_ir_context = make_once


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers share what is compiled with each other and with the last session; nothing touches the home folder."""
    values = {
        "RLHF_SCRATCH": str(tmp_path_factory.mktemp("scratch")),
        "RLHF_COMPILE_CACHE": os.environ["JAX_COMPILATION_CACHE_DIR"],
        "COLUMNS": "200",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def rlhf() -> Command:
    """Runs `rlhf ARGS` as a process; `code` is the exit status that it must have."""

    def run(*args: Any, code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [RLHF, *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)
        assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def rlhf_here() -> Callable[..., Any]:
    """As `rlhf`, without a process: for what looks or refuses, of which a process's start is most of the time."""
    # Here and not above: tests of the core load no flows.
    from tests.flows.commands import typed

    return typed


@pytest.fixture
def compiled(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., list[str | None]]]:
    """`compiled(program, of="")`: the threads that have compiled a program of this name whose arguments name `of`."""
    # Here and not above: many tests load no JAX.
    import jax

    def threads(program: str, of: str = "") -> list[str | None]:
        lines = [(record.getMessage(), record.threadName) for record in caplog.records]
        return [name for line, name in lines if re.match(rf"Compiling (jit\()?{program}\b", line) and of in line]

    was = jax.config.jax_log_compiles  # type: ignore[attr-defined]
    jax.config.update("jax_log_compiles", True)
    with caplog.at_level(logging.WARNING):
        yield threads
    jax.config.update("jax_log_compiles", was)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the test processes of one session (pytest-xdist) share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def smoke_store(rlhf: Command, shared: Path) -> Path:
    """The store after `rlhf run smoke --name first`. Read only: tests that change a store take `store`."""
    # The first process that asks makes it.
    folder = shared / "smoke" / "store"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder.parent / "done").exists():
            with listeners() as found:
                rlhf("run", "smoke", "--no-prefect", "--name", "first", "--set", f"store={folder}")
            (folder.parent / LISTENERS).write_text(json.dumps(sorted(found)))
            (folder.parent / "done").touch()
    return folder


@pytest.fixture(scope="session")
def prefect_database(shared: Path) -> Path:
    """Where the first of `tests.flows.prefect_server` leaves its database for the others."""
    folder = shared / "prefect-database"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def store(smoke_store: Path, tmp_path: Path) -> Path:
    """A copy of the smoke run's store."""
    return Path(shutil.copytree(smoke_store, tmp_path / "store"))


@pytest.fixture(scope="session")
def record() -> Callable[..., dict[str, Any]]:
    """Reads `run.json` of a run."""

    # Here and not above: tests of the core load no stages.
    from rlhf.stages.store.artifacts import Store

    def read(store: Path | str, name: str) -> dict[str, Any]:
        found = Store(str(store)).read_json("runs", name, "run.json")
        assert found is not None
        return found

    return read


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """URL of a bucket on a real S3 server of this machine."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import boto3

        boto3.client("s3").create_bucket(Bucket="bucket")
        yield "s3://bucket"
    server.stop()

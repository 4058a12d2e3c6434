"""A real Prefect server and worker for tests: own home, loopback only, ended by whoever started them."""

import contextlib
import fcntl
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.support import free_port

PROJECT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join(map(str, (PROJECT / "src", PROJECT)))

T = TypeVar("T")


def wait_for(look: Callable[[], T | None], seconds: float, what: str) -> T:
    """What `look` returns as soon as that is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.3)
    raise AssertionError(f"waited {seconds:.0f} s for {what}")


class Prefect:
    """A server's place and the commands that use it."""

    def __init__(self, folder: Path, ui: bool = False):
        self.port = free_port()
        self.folder = folder
        self.ui = f"http://127.0.0.1:{self.port}"
        self.env = os.environ | {
            "PREFECT_HOME": str(folder / "home"),
            "PREFECT_API_URL": f"{self.ui}/api",
            "PREFECT_UI_STATIC_DIRECTORY": str(folder / "ui"),
            # A server copies its pages at each start, for two seconds.
            "PREFECT_SERVER_UI_ENABLED": str(ui).lower(),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            # The tests start processes from a checkout, whichever one is installed.
            "PYTHONPATH": PYTHONPATH,
        }
        # The server closes a connection that has been idle for 5 s, perhaps while it is being used again.
        fresh = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=f"{self.ui}/api", timeout=120, limits=fresh)

    def command(self, *args: str, code: int = 0, cwd: Path = PROJECT) -> str:
        """Output of `prefect ARGS` in the project's folder."""
        command = [sys.executable, "-m", "prefect", "--no-prompt", *args]
        done = subprocess.run(command, cwd=cwd, env=self.env, capture_output=True, text=True, timeout=180)
        output = done.stdout + done.stderr
        assert done.returncode == code, f"prefect {' '.join(args)} ended with {done.returncode}:\n{output}"
        return output

    def pool(self, name: str, limit: int | None = None) -> None:
        """Makes a work pool of processes, as `prefect work-pool create NAME --type process` does."""
        from prefect.workers.process import ProcessWorker

        template = ProcessWorker.get_default_base_job_template()
        self.post("/work_pools/", name=name, type="process", base_job_template=template, concurrency_limit=limit)

    @contextlib.contextmanager
    def running(self, name: str, *args: str) -> Iterator[subprocess.Popen[bytes]]:
        """`prefect ARGS` in the background, with all its children in a group that ends here."""
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "prefect", *args],
                cwd=PROJECT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def post(self, url: str, /, **body: Any) -> Any:
        answer = self.http.post(url, json=body)
        while answer.status_code == 503:  # the database was busy for too long; Prefect's own client asks again too
            time.sleep(1)
            answer = self.http.post(url, json=body)
        assert answer.is_success, f"{url}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def get(self, url: str) -> Any:
        return self.http.get(url).raise_for_status().json()

    def keep_database(self, path: Path) -> None:
        """Copies the database of the server that runs."""
        made = path.with_suffix(".made")
        own = Path(self.env["PREFECT_HOME"]) / "prefect.db"
        with contextlib.closing(sqlite3.connect(own)) as database, contextlib.closing(sqlite3.connect(made)) as copy:
            database.backup(copy)
        made.rename(path)

    def healthy(self) -> bool:
        try:
            return self.http.get("/health").is_success
        except httpx.TransportError:
            return False

    def flow_run(self, name: str) -> dict[str, Any]:
        """A flow run by its name."""
        found = self.post("/flow_runs/filter", flow_runs={"name": {"any_": [name]}})
        assert len(found) == 1, f"{len(found)} flow runs are called {name}"
        return found[0]

    def ended(self, name: str, seconds: float) -> dict[str, Any]:
        """A flow run once it is over."""
        return self.ended_run(self.flow_run(name)["id"], seconds)

    def ended_run(self, flow_run: str, seconds: float) -> dict[str, Any]:
        """As `ended`, of the run with this id, whatever it is called meanwhile."""
        over = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")

        def look() -> dict[str, Any] | None:
            run: dict[str, Any] = self.get(f"/flow_runs/{flow_run}")
            return run if run["state_type"] in over else None

        return wait_for(look, seconds, f"the end of {flow_run}")

    def task_runs(self, flow_run: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The task runs of a flow run by their names."""
        found = self.post("/task_runs/filter", flow_runs={"id": {"any_": [flow_run["id"]]}})
        return {t["name"]: t for t in found}

    def artifacts(self, flow_run: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The artifacts of a flow run by their keys."""
        found = self.post("/artifacts/filter", flow_runs={"id": {"any_": [flow_run["id"]]}})
        return {a["key"]: a for a in found}


@contextlib.contextmanager
def prefect_server(folder: Path, ui: bool = False, shared: Path | None = None) -> Iterator[Prefect]:
    """A server that is ready for requests.

    ui: whether it has pages. shared: a folder where the first server leaves its empty database for the others, which
    would take five seconds each to bring one to its newest form.
    """
    prefect = Prefect(folder, ui)
    with contextlib.ExitStack() as stack:
        with first_of(shared) as kept:
            if kept is not None and kept.exists():
                home = Path(prefect.env["PREFECT_HOME"])
                home.mkdir()
                shutil.copy(kept, home / "prefect.db")
            command = ["server", "start", "--host", "127.0.0.1", "--port", str(prefect.port)]
            stack.enter_context(prefect.running("server", *command))
            wait_for(prefect.healthy, 120, "the Prefect server")
            if kept is not None and not kept.exists():
                prefect.keep_database(kept)
        yield prefect
    prefect.http.close()


@contextlib.contextmanager
def first_of(shared: Path | None) -> Iterator[Path | None]:
    """Where the shared database is or is to be made: others wait as long as it is made."""
    if shared is None:
        yield None
        return
    kept = shared / "prefect.db"
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not kept.exists():
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield kept

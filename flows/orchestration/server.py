"""A Prefect server for one command: on loopback, without output, ended with the command.

Prefect's own temporary server starts after the client's imports and repeats the server's imports in the client, which
is half the time of a cached run. Ctrl-C ends it before it records the end of the run. The database is in PREFECT_HOME
as usual: a later `prefect server start` shows the runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from rlhf.stages.worker import interpreter
from rlhf.tuning.retries import pause

START_SECONDS = 120.0
TRY_SECONDS, PAUSE_SECONDS = 5.0, 0.1
WATCH_SECONDS = 0.2
RESTARTS = 10
"""The pauses between them last through an outage of minutes."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0

FILES = (".env", "prefect.toml", "pyproject.toml")
"""Files of the current folder that Prefect reads."""
_SERVER = re.compile(r"PREFECT_API_URL|profiles_path|^\s*\[(tool\.prefect\.)?api\]|\bapi\b.*\burl\b", re.M | re.I)


class ServerFailed(RuntimeError):
    """The private server did not come up."""


def may_be_set() -> bool:
    """Whether Prefect may be configured to use a server, without its import of two seconds."""
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    named = "PREFECT_API_URL" in os.environ or "PREFECT_PROFILES_PATH" in os.environ
    return named or (home / "profiles.toml").exists() or any(map(_names_a_server, FILES))


def _names_a_server(file: str) -> bool:
    with contextlib.suppress(OSError):
        return _SERVER.search(Path(file).read_text(errors="replace")) is not None
    return False


def reach_directly() -> None:
    """Let this process and its children reach this machine without a proxy of the environment."""
    # Libraries read one of the two names: both get the hosts of either.
    hosts = [host.strip() for name in ("NO_PROXY", "no_proxy") for host in os.environ.get(name, "").split(",")]
    if "*" in hosts:
        return
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(dict.fromkeys(filter(None, [*hosts, "127.0.0.1"])))


class PrivateServer:
    """A server process. The constructor returns at once; `wait` returns when the server answers.

    A server that has answered and dies (out of memory, kill -9) is restarted: its database is on disk, and requests
    wait.
    """

    def __init__(self) -> None:
        # The socket listens before the process is ready: no other process can take the port, and early requests wait.
        self._listener = socket.create_server(("127.0.0.1", 0))
        origin = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = f"{origin}/api"
        self.auth = f"rlhf:{secrets.token_urlsafe(24)}"
        """The value of PREFECT_API_AUTH_STRING for clients: other users of this machine can reach the port."""
        self._environment = os.environ | {
            "PREFECT_SERVER_API_AUTH_STRING": self.auth,
            "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": origin,
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._stopping = threading.Event()
        self._process = self._start()
        self._watcher = threading.Thread(target=self._watch, name="server-watch", daemon=True)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            interpreter.command("rlhf.flows.orchestration.server", str(self._listener.fileno()), str(os.getpid())),
            pass_fds=[self._listener.fileno()],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C ends the run; the server stays to record its end
        )

    def _watch(self) -> None:
        """Restart the server when it dies."""
        for restart in range(RESTARTS):
            while self._process.poll() is None:
                if self._stopping.wait(WATCH_SECONDS):
                    return
            if self._stopping.wait(pause(restart - 1, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS) if restart else 0.0):
                return
            # A failed start, such as for want of memory, counts as another death.
            with contextlib.suppress(OSError):
                self._process = self._start()
        # After the last server, requests must fail and not wait.
        self._listener.close()

    def wait(self) -> None:
        """Wait until the server answers. Raises ServerFailed with the end of its log."""
        deadline = time.monotonic() + START_SECONDS
        # A proxy of the environment is for other hosts.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < deadline and self._process.poll() is None:
            # Short tries: the socket accepts a request even if the process is dead.
            with contextlib.suppress(OSError), direct.open(f"{self.url}/health", timeout=TRY_SECONDS):
                self._watcher.start()
                return
            time.sleep(PAUSE_SECONDS)
        code = self._process.poll()
        how = f"gave no answer within {START_SECONDS:g} s" if code is None else f"exited with status {code}"
        self.stop()
        self._log.seek(0)
        output = self._log.read().decode(errors="replace").strip()[-2000:] or "(it printed nothing)"
        raise ServerFailed(f"Prefect's local server {how}:\n{output}\nadd --no-prefect to run without it")

    def stop(self) -> None:
        """End the server; kill it after five seconds."""
        self._stopping.set()
        if self._watcher.is_alive():
            # The watcher may be starting a server.
            self._watcher.join()
        self._listener.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@contextlib.contextmanager
def one_at_a_time(path: str) -> Iterator[None]:
    """Lock a file, because two servers that create one database at once fail. Prints the holder if it waits."""
    # The file has the holder's process id: do not truncate it before the lock is held.
    with open(path, "a+") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            f.seek(0)
            holder = f.read().strip()
            who = f"process {holder}" if holder else "another process"
            print(f"waiting for the lock {path}, which {who} holds; if it hangs, type `fuser -k {path}`", flush=True)
            fcntl.flock(f, fcntl.LOCK_EX)
        f.truncate(0)
        f.write(str(os.getpid()))
        f.flush()
        yield


def end_without(parent: int) -> None:
    """End this process after its parent, even after a kill."""
    while os.getppid() == parent:
        time.sleep(1)
    # Not sys.exit, which would end this thread alone.
    os._exit(1)


def serve(descriptor: int, parent: int) -> None:
    """Serve on an open socket until a signal, or the end of the parent."""
    threading.Thread(target=end_without, args=(parent,), daemon=True).start()
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    starting = contextlib.ExitStack()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            # The database exists: the next server may start.
            starting.close()

    home = get_current_settings().home
    home.mkdir(parents=True, exist_ok=True)
    starting.enter_context(one_at_a_time(str(home / "rlhf-server.lock")))
    app = create_app(ephemeral=True, final=True)
    config = uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=2)
    Server(config).run(sockets=[socket.socket(fileno=descriptor)])


def main() -> None:
    """Read descriptor and parent from the command line."""
    serve(int(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()

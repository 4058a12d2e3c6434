"""A server that this process starts on loopback, and that ends with it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlhf.tuning.rollout.servers import keeper


class Child:
    """One server; each start has a port of its own."""

    def __init__(self, command: Callable[[Path, int], Sequence[str]], environment: Mapping[str, str], log: Path):
        """`command` returns the command line for a model's folder and a port; the server's output goes to `log`."""
        self.command, self.environment, self.log = command, dict(environment), log
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """The process of its `keeper`; None if it was never started."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self, folder: Path) -> str:
        """Starts it on a model, after ending one that runs; returns its URL.

        It does not answer yet: see `RemoteServer.wait`.
        """
        self.end()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-S", str(Path(keeper.__file__)), *self.command(folder, port)]
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(command[3:])}\n".encode())
            log.flush()
            # Its own session: Ctrl-C at the terminal reaches only the owner, and the keeper sees the owner end.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | self.environment,
                start_new_session=True,
            )
        self.starts += 1
        return f"http://127.0.0.1:{port}"

    def end(self) -> None:
        """Ends the server and every process that it started."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process = None

    def obituary(self) -> str:
        """How it ended, with the last lines of its log."""
        code = None if self._process is None else self._process.poll()
        how = "has not been started" if self._process is None else f"ended with status {code}"
        tail: deque[str] = deque(maxlen=5)
        if self.log.exists():
            with self.log.open(errors="replace") as f:
                tail.extend(line.rstrip() for line in f if line.strip())
        return f"it {how}\n  log: {self.log}" + "".join(f"\n    {line}" for line in tail)

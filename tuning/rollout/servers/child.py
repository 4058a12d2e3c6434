"""A server that this process starts on loopback, and that ends with this process."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlhf.tuning.rollout.servers import keeper


def gpus_of_servers(words: Sequence[str], servers: int, environment: Mapping[str, str]) -> list[list[str]]:
    """Divide the NVIDIA GPUs of an environment over several servers: neighbours each.

    words: of their command line, whose sizes of parallelism multiply to the GPUs of one server. The result has values
    for CUDA_VISIBLE_DEVICES, none for a single server or without GPUs. Raises ValueError if there are too few.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES")
    # CUDA numbers the GPUs that a container has from 0 on.
    numbers = map(str, range(len(list(Path("/dev").glob("nvidia[0-9]*")))))
    gpus = list(numbers) if named is None else [part.strip() for part in named.split(",") if part.strip()]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("tensor", "pipeline", "data"):
        short = f"{name[0]}p"
        parser.add_argument(
            f"--{name}-parallel-size", f"-{short}", f"--{short}", f"--{short}-size", type=int, default=1
        )
    known, _ = parser.parse_known_args([w.replace("_", "-") if w.startswith("--") else w for w in words])
    each = math.prod(vars(known).values())
    if servers == 1 or not gpus:
        return [[] for _ in range(servers)]
    if len(gpus) < servers * each:
        raise ValueError(
            f"{servers} servers with {each} GPUs each need {servers * each}, and there are {len(gpus)} "
            f"({', '.join(gpus)}): set rl.rollout.engine.servers or --tensor-parallel-size in arguments"
        )
    return [gpus[i * each : (i + 1) * each] for i in range(servers)]


LOG_LINES = 500
"""Lines of a server's log that outlive it: the cause of its end stands above the traces of its other processes."""


class Child:
    """One server; each start selects a free port."""

    def __init__(self, command: Callable[[Path, int], Sequence[str]], environment: Mapping[str, str], log: Path):
        """command: returns the command line for a model's folder and a port. log: file for the server's output."""
        self.command, self.environment, self.log = command, dict(environment), log
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = self._printed = 0

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self, folder: Path) -> str:
        """Start it on a model, after the end of a running server; returns its URL.

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
            # In another session, Ctrl-C reaches only the owner. The keeper ends the server after its owner.
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

    def leave(self) -> None:
        """Begin the end of the server."""
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def end(self) -> None:
        """End the server and every process that it started."""
        if self._process is None:
            return
        self.leave()
        self._process.wait()
        self._process = None

    def obituary(self) -> str:
        """Describe its state, with the last lines of its log; prints more of them, as the log ends with the worker."""
        if self._process is None:
            return "it has not been started"
        how = "runs" if self.alive else f"ended with status {self._process.poll()}"
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        if self._printed != self.starts:
            self._printed = self.starts
            # A worker's log may be on a full disk.
            with contextlib.suppress(OSError):
                print(f"---- the end of {self.log} ----", *lines[-LOG_LINES:], sep="\n", flush=True)
        where = f"the worker's log has the last {LOG_LINES} lines of {self.log}"
        return "\n    ".join([f"it {how}\n  {where}", *[line for line in lines if line.strip()][-5:]])

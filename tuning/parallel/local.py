"""A host process on this machine (`rlhf.tuning.parallel.host`), as its owner sees it."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.tuning.parallel.children import clean_environment, ending
from rlhf.tuning.parallel.host import LOAD_SECONDS
from rlhf.tuning.parallel.messages import pack

STOP_SECONDS = 5.0
"""Longest time for a host to end its children and itself."""
_START = "import sys; sys.path[:] = {path}; from rlhf.tuning.parallel.host import main; main({folder}, {descriptor})"

Deliver = Callable[[Any, dict[str, Any]], None]
"""Called in a thread with a host and each of its messages; `{"lost": "..."}` is the last one."""


class Local:
    """A host process. It imports the target while its owner continues."""

    blocks = 1
    """Jobs that it is given at a time, as a multiple of its processes."""

    def __init__(self, settings: Mapping[str, Any], deliver: Deliver) -> None:
        """settings: `target`, its `arguments`, and `processes` (`rlhf.tuning.parallel.pool`)."""
        self.name = "this machine"
        self._deliver = deliver
        self._folder = tempfile.mkdtemp(prefix="rlhf-jobs-")
        Path(self._folder, "settings.json").write_text(json.dumps(settings))
        self._stream, theirs = socket.socketpair()
        code = _START.format(path=json.dumps(sys.path), folder=json.dumps(self._folder), descriptor=theirs.fileno())
        with theirs:
            # A fresh interpreter: this process may hold JAX and its threads.
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=clean_environment(),
                start_new_session=True,
            )
        threading.Thread(target=self._receive, name="jobs", daemon=True).start()

    def _receive(self) -> None:
        with contextlib.suppress(OSError), self._stream.makefile("rb") as lines:
            for line in lines:
                # A host that is killed leaves the beginning of a message.
                if line.endswith(b"\n"):
                    self._deliver(self, json.loads(line))
        status = self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        slow = f" (after {LOAD_SECONDS} s)" if status == -signal.SIGALRM else ""
        self._deliver(self, {"lost": ending(status) + slow})

    def send(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Send messages. The thread that receives reports a host that is dead."""
        with contextlib.suppress(OSError):
            self._stream.sendall(b"".join(map(pack, messages)))

    def close(self) -> None:
        """End the host with all of its children."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stream.close()
        shutil.rmtree(self._folder, ignore_errors=True)

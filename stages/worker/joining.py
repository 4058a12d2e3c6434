"""How a rank stays in its gang from lead to lead, and how it is told that the run is over."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable

from stages.worker import channel, interpreter
from stages.worker.client import worker_environment
from stages.worker.places import Place

ENDED, GONE, REFUSED, AGAIN = 0, 69, 77, 75
"""Exit statuses of a rank: sent home; no lead came; not taken (sysexits.h: unavailable, no permission, try again)."""


def send_home(place: Place, wait: float = 20.0) -> None:
    """Tells the ranks of a gang whose run has no worker, or has one no more, that it is over.

    For those that have not come within `wait` seconds it does not wait: they end when theirs is over.
    """
    if place.starts or place.rank:
        return
    left, deadline = set(range(1, place.ranks)), time.monotonic() + wait
    with contextlib.suppress(OSError), channel.listen(place.host, place.port) as server:
        server.settimeout(1.0)
        while left and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError, ValueError, channel.Refused):
                opened, hello = channel.welcome(server.accept()[0], place.token)
                opened.send({"bye": "end"})
                left.discard(hello.get("rank"))


def stay(address: str, rank: int, told: Callable[[str], None]) -> int:
    """Has a process join the gang at `address` as `rank`, and another one whenever its lead was lost.

    Returns 0 when a lead has sent it home, else the status of a rank that is not taken or waited in vain.
    """
    while True:
        command = interpreter.command(
            "stages.worker.rank", "--join", address, "--rank", str(rank), "--parent", str(os.getpid())
        )
        code = subprocess.call(command, stdin=subprocess.DEVNULL, env=worker_environment())
        if code in (ENDED, GONE, REFUSED):
            return code
        told(f"rank {rank} has lost its lead and waits for the next one at {address}")

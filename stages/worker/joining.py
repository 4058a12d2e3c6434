"""How a rank stays in its gang from lead to lead, and how it is told that the run is over."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable

from stages.worker import channel, interpreter, places
from stages.worker.channel import Channel, Message
from stages.worker.client import worker_environment
from stages.worker.places import Place
from stages.worker.reception import Reception

ENDED, GONE, REFUSED, AGAIN, LATER = 0, 69, 77, 75, 73
"""Exit statuses of a rank: sent home; no lead came; not taken, nor another time; it was in the gang and has lost its
lead; not taken this time (most are of sysexits.h: unavailable, no permission, try again)."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.3, 30.0
"""Before another try of a rank that has not got in: the first, doubled up to the longest."""


def send_home(place: Place, wait: float = 20.0) -> None:
    """Tells the ranks of a gang whose run has no worker, or has one no more, that it is over.

    For those that have not come within `wait` seconds it does not wait: they end when theirs is over.
    """
    if place.starts or place.rank:
        return
    left, deadline = set(range(1, place.ranks)), time.monotonic() + wait

    def tell(opened: Channel, hello: Message) -> None:
        with contextlib.suppress(OSError):
            opened.send({"bye": "end"})
            left.discard(hello.get("rank"))

    with contextlib.suppress(OSError), channel.listen(place.host, place.port) as server:
        server.settimeout(0.1)
        with contextlib.closing(Reception(server, place.token, tell)) as reception:
            while left and time.monotonic() < deadline:
                # One that is reset meanwhile keeps the others from nothing.
                with contextlib.suppress(OSError):
                    reception.accept()


def stay(address: str, rank: int, told: Callable[[str], None]) -> int:
    """Has a process join the gang at `address` as `rank`, and another one whenever its lead was lost.

    One whose process was in the gang goes on, whatever has ended it. Returns 0 when a lead has sent it home, else the
    status of a rank that is not taken, waited in vain, or has not got into the gang for RLHF_GANG_WAIT seconds. Raises
    PlaceError.
    """
    wait = places.seconds(os.environ, places.WAIT, Place.wait)
    last, pause = time.monotonic(), PAUSE_SECONDS
    while True:
        code, joined = _life(address, rank)
        now, how = time.monotonic(), interpreter.end_of(code)
        if code in (ENDED, GONE, REFUSED):
            return code
        if joined or code == AGAIN:
            last, pause = now, PAUSE_SECONDS
            lost = "has lost its lead and" if code == AGAIN else f"was in the gang, and its process {how}; it"
            told(f"rank {rank} {lost} waits for the next one at {address}")
        elif now - last > wait:
            told(f"rank {rank} has not got into the gang at {address} for {wait:g} s; its last process {how}")
            return GONE
        else:
            told(f"rank {rank} has not got into the gang at {address} (its process {how}), and tries again")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _life(address: str, rank: int) -> tuple[int, bool]:
    """The exit status of a process of a rank, and whether it was in the gang."""
    reading, writing = os.pipe()
    # What the rank has started may hold its end open.
    os.set_blocking(reading, False)
    try:
        arguments = ["--join", address, "--rank", str(rank), "--parent", str(os.getpid()), "--joined", str(writing)]
        command = interpreter.command("stages.worker.rank", *arguments)
        code = subprocess.call(command, stdin=subprocess.DEVNULL, env=worker_environment(gang=True), pass_fds=[writing])
        joined = b""
        with contextlib.suppress(BlockingIOError):
            joined = os.read(reading, 1)
        return code, joined != b""
    finally:
        os.close(writing)
        os.close(reading)

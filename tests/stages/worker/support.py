"""A request for a stage without inputs, a listener that hears nothing, and a lead that waits for its ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stages.worker import channel
from stages.worker.channel import Channel
from stages.worker.gang import Gang
from stages.worker.places import Place
from stages.worker.protocol import Report, Request

TOKEN = "0123456789abcdef"


def request(store: Path, name: str = "base", **config: Any) -> Request:
    """What a session sends for a stage without inputs."""
    settings = {"source": "random:tiny"} | config
    return Request(name, "k" * 64, {}, settings, {}, seed=7, store=str(store), run="test")


def ignore(event: Report) -> None:
    pass


@contextlib.contextmanager
def waiting(ranks: int, told: Callable[[str], None] = print) -> Iterator[tuple[Gang, Callable[[int, int], Channel]]]:
    """A lead that waits for its ranks, and how one joins by number and process id; within it all have to come."""
    with channel.listen("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        lead = Gang(Place(ranks, 0, "127.0.0.1", port, TOKEN, False, wait=60.0), print, print, told)
        thread = threading.Thread(target=lead._welcome_all, args=[server], daemon=True)
        thread.start()
        yield (
            lead,
            lambda rank, pid: channel.connect(
                "127.0.0.1", port, TOKEN, {"rank": rank, "host": "a", "pid": pid}, wait=15
            ),
        )
        thread.join(30)
    assert not thread.is_alive()
    for member in lead._members.values():
        member.channel.close()

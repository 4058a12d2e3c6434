"""Addresses at which the processes below this one listen, looked at while something runs."""

import contextlib
import threading
from collections.abc import Iterator

import psutil

LISTENERS = "listeners.json"
"""Beside the store of the smoke run."""
SECONDS = 0.2
"""Between two looks."""


@contextlib.contextmanager
def listeners() -> Iterator[set[str]]:
    """The addresses that children, and children of children, listen at or receive datagrams at meanwhile."""
    found: set[str] = set()
    ended = threading.Event()

    def look() -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                for one in process.net_connections("inet"):
                    if one.status in (psutil.CONN_LISTEN, psutil.CONN_NONE) and one.laddr and not one.raddr:
                        found.add(one.laddr.ip)

    def watch() -> None:
        while not ended.wait(SECONDS):
            look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()

"""A worker whose stages live, and never come to an end."""

import time

from stages.worker import process
from stages.worker.protocol import Heartbeat


def waits_for_ever(request, memory, events):
    while True:
        time.sleep(0.1)
        events.send(Heartbeat())


def main() -> None:
    process.run_request = waits_for_ever
    # The first beat is sent where it waits, however long the start takes.
    process.HEARTBEAT_SECONDS = 3600.0
    process.main()

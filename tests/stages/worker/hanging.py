"""A worker whose stages live and have nothing to report, for ever or for as many heartbeats as BEATS says.

With COMPILES set these say that it compiles.
"""

import os
import time

from stages.worker import process
from stages.worker.protocol import Heartbeat


def waits_for_ever(request, memory, events):
    beats = int(os.environ.get("BEATS", "-1"))
    while beats:
        time.sleep(0.1)
        events.send(Heartbeat("COMPILES" in os.environ))
        beats -= 1
    return {}


def main() -> None:
    process.run_request = waits_for_ever
    # The first beat is sent where it waits, however long the start takes.
    process.HEARTBEAT_SECONDS = 3600.0
    process.main()

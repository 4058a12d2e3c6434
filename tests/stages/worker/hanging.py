"""A worker whose stages live and have nothing to report, for ever or for as many heartbeats as BEATS says.

With COMPILES set these say that it compiles, `in turn` that it does so every other time. With DEAF set it reads no
request.
"""

import os
import sys
import time

from rlhf.stages.worker import process
from rlhf.stages.worker.protocol import Heartbeat


def waits_for_ever(request, memory, events):
    beats = int(os.environ.get("BEATS", "-1"))
    while beats:
        time.sleep(0.1)
        compiles = os.environ.get("COMPILES")
        events.send(Heartbeat(bool(compiles) and (compiles != "in turn" or beats % 2 == 0)))
        beats -= 1
    return {}


def deaf():
    descriptor = int(sys.argv[sys.argv.index("--events") + 1])
    waits_for_ever(None, None, process.Events(os.fdopen(descriptor, "w")))


def main() -> None:
    process.run_request = waits_for_ever
    # The first beat is sent where it waits, however long the start takes.
    process.HEARTBEAT_SECONDS = 3600.0
    if "DEAF" in os.environ:
        process.configure_jax = deaf
    process.main()

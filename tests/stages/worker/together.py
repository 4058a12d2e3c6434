"""A process of a group without JAX: process 1 does what the request's source says, process 0 waits for it."""

import os
import signal
import time

from rlhf.stages.worker import process
from rlhf.stages.worker.protocol import Log
from rlhf.tuning import multihost

OWN = int(os.environ[multihost.INDEX])


class JaxRuntimeError(RuntimeError):
    """Under the name of JAX's."""


def runs(request, memory, events):
    events.send(Log(f"process {OWN}"))
    match request.config["source"], OWN:
        case "well", _:
            return {"made by": OWN}
        case "raises", 1:
            raise ValueError("no such layer")
        case "both raise", _:
            raise ValueError(f"process {OWN} says so")
        case "loses a peer", 0:
            # The other one may live on, in a network that was cut.
            raise JaxRuntimeError("UNKNOWN: Gloo AllGather failed: Connection closed by peer [10.0.0.2]:26519")
        case "fails and costs its peer", 0:
            raise JaxRuntimeError("UNKNOWN: Gloo AllGather failed: Connection closed by peer [10.0.0.2]:26519")
        case "fails and costs its peer", 1:
            raise ValueError("the cause")
        case "dies", 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case "fails late", 0:
            return {"made by": OWN}
        case "fails late", 1:
            time.sleep(0.5)
            raise ValueError("after the commit")
    time.sleep(600)


def main() -> None:
    process._join = lambda: None
    process.run_request = runs
    process.main()

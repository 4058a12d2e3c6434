"""The process of one session, or of one stateless job after another: it makes the target and answers jobs.

host to child   {"job": 7, "payload": ..., "megabytes": 1024}
child to host   {"started": true} when it has read that, or {"refused": "..."}, then {"job": 7, "value": ...} or
                {"job": 7, "error": "..."}
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.tuning.parallel.children import memory_limit, status_of
from rlhf.tuning.parallel.messages import pack

REASON_CHARACTERS = 500
"""Length to which the message of an error is cut."""


def target_of(name: str) -> Any:
    """Import the class `module:Class` that a pool names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def serve(stream: socket.socket, target: str, arguments: Mapping[str, Any], session: bool, folder: str) -> None:
    """Answer jobs until the stream ends; temporary files are below `folder`."""
    # Both: subprocesses read the environment, this process may have read it.
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    try:
        make = target_of(target)
        make.load(**arguments)
        handler = make(**arguments)
    # A module may raise anything as it is imported, SystemExit too.
    except BaseException as error:
        stream.sendall(pack({"refused": describe(error)}))
        return
    held, own = status_of("VmData"), os.getpid()
    with stream.makefile("rb") as jobs:
        for line in jobs:
            job = json.loads(line)
            # Its time begins: a round of long completions takes a while to arrive.
            stream.sendall(pack({"started": True}))
            number = {"job": job["job"]}
            # A session keeps what it allocates; a stateless job begins with what the process already holds.
            held = held if session else status_of("VmData")
            try:
                with memory_limit(held + job["megabytes"] * 1024):
                    answer = pack({**number, "value": handler(job["payload"])})
            except MemoryError:
                answer = pack({**number, "error": f"MemoryError: more than {job['megabytes']} MB"})
            # A user's code may raise anything, SystemExit and KeyboardInterrupt among them.
            except BaseException as error:
                answer = pack({**number, "error": describe(error)})
            if os.getpid() != own:
                # The job has forked: only the child itself answers and takes the next job.
                os._exit(1)
            stream.sendall(answer)
    handler.close()


def describe(error: BaseException) -> str:
    """Describe an exception in one line, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:REASON_CHARACTERS] + place

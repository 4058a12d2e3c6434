"""The end of a command's process, also where Prefect's client still holds what its server does not take.

At the exit of a process that client waits until its events and logs are sent, each tried for minutes: with a server
that hangs the process would be there long after its last line. This is for a command's own process; one that serves
other runs too is not left like this.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn

_unsent = False


def leave_soon() -> None:
    """Says that this process may not wait for Prefect's client when it ends."""
    global _unsent
    _unsent = True


def leave(error: BaseException) -> NoReturn:
    """Ends the process as `error` does: at once where something was left unsent."""
    if not _unsent:
        raise error
    status: object = error.code if isinstance(error, SystemExit) else 1
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    elif status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        # A pipe that nobody reads any more.
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status if isinstance(status, int) else 0)

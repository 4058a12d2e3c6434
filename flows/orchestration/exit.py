"""The end of a command's process, also where Prefect's client still holds what its server does not take.

At the exit of a process that client waits until its events and logs are sent, each tried for minutes: with a server
that hangs the process would be there long after its last line. This is for a command's own process; one that serves
other runs too is not left like this.
"""

from __future__ import annotations

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
    status = 1
    try:
        status = _told(error)
        for stream in (sys.stdout, sys.stderr):
            # None where it was closed before the process began.
            if stream is not None:
                stream.flush()
    except OSError:
        # A pipe that nobody reads any more.
        pass
    finally:
        os._exit(status)


def _told(error: BaseException) -> int:
    """The exit status, as Python would give it; what it would print is printed."""
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1

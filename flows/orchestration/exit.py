"""The end of a command's process while Prefect's client still holds events that its server does not accept.

At exit that client tries for minutes to send its events and logs: with a hanging server, the process would outlive its
last line. Only for the process of a command.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

_unsent = False


def leave_soon() -> None:
    """Let this process end without waiting for Prefect's client."""
    global _unsent
    _unsent = True


def leave(error: BaseException) -> NoReturn:
    """End the process as `error` does, at once after `leave_soon`."""
    if not _unsent:
        raise error
    status = 1
    try:
        status = _report(error)
        for stream in (sys.stdout, sys.stderr):
            # None if it was closed before the process began.
            if stream is not None:
                stream.flush()
    except OSError:
        # The reader of a pipe is gone.
        pass
    finally:
        os._exit(status)


def _report(error: BaseException) -> int:
    """Print the error and return the exit status, as Python would."""
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1

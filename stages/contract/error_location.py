"""Where in a user's own code an error came up."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

_OTHERS = (str(Path(__file__).parents[2]) + os.sep, sys.prefix, sys.base_prefix, "<")


def place_of(error: BaseException) -> str:
    """`my_algorithm.py, line 7: ` for an error in code that is neither this project's nor a library's; else empty."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "site-packages" not in frame.filename and not frame.filename.startswith(_OTHERS):
            return f"{Path(frame.filename).name}, line {frame.lineno}: "
    return ""

"""The place of an error in a user's code."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

_OTHERS = (str(Path(__file__).parents[2]) + os.sep, sys.prefix, sys.base_prefix, "<")


def place_of(error: BaseException) -> str:
    """Return `my_algorithm.py, line 7: ` for an error in code of neither this project nor a library; else empty."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "site-packages" not in frame.filename and not frame.filename.startswith(_OTHERS):
            return f"{Path(frame.filename).name}, line {frame.lineno}: "
    return ""

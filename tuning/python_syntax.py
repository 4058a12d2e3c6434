"""Python's parser for threads: two that parse at once may get a SystemError from CPython 3.11 (gh-106905)."""

import ast
import threading
from typing import Any

_lock = threading.Lock()


def parse(source: str | bytes, filename: str = "<unknown>", mode: str = "exec") -> Any:
    """Parse as `ast.parse` does, one source at a time."""
    with _lock:
        return ast.parse(source, filename, mode)

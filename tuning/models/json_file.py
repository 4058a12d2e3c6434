"""JSON files of model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, naming the file, for one that holds none."""
    try:
        # Bytes, so that a byte order mark and the encoding of the locale do not matter.
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON ({error}); check that the download is complete") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values

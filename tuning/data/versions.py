"""The versions of the code that computes rows: `rlhf.tuning`, Python and libraries.

Pickles name code but do not hold it: a worker runs the code of its image. The plan of a pipeline holds `Versions`,
which compare themselves with the worker's when they are unpickled. Receipts of another version are ignored
(`rlhf.tuning.data.receipts`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TUNING = Path(__file__).parents[1]
LIBRARIES = ("apache-beam", "jinja2", "numpy", "pyarrow", "regex", "tokenizers", "transformers")
ABSENT = "absent"


class OtherVersion(RuntimeError):
    """A worker has other code or libraries than the run; the message says which."""


class Versions(dict[str, str]):
    """Versions by name of a module, a library or Python. Unpickling fails unless they equal those of this process."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[dict[str, str]]]:
        return compared, (dict(self),)

    @functools.cached_property
    def digest(self) -> str:
        """A hash of all versions."""
        return hashlib.sha256(json.dumps(self, sort_keys=True).encode()).hexdigest()[:16]


def compared(there: dict[str, str]) -> Versions:
    """Return the versions of this process. Raises OtherVersion if they differ from those of the run."""
    mine = here()
    for name in sorted(there.keys() | mine.keys()):
        one, other = there.get(name, ABSENT), mine.get(name, ABSENT)
        if one != other:
            raise OtherVersion(
                f"{name} is {other} in this worker and {one} in the run: build the image of the workers from the "
                "commit of the run (on one machine, run again)"
            )
    return mine


@functools.cache
def here() -> Versions:
    """Return the versions of this process, at the first call."""
    found = Versions(Python=f"{sys.version_info.major}.{sys.version_info.minor}")
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ABSENT
    for path in TUNING.rglob("*.py"):
        name = ".".join(("rlhf.tuning", *path.relative_to(TUNING).with_suffix("").parts))
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return found

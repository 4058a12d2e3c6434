"""The versions of what makes rows: the code of this project that workers reach by import, Python, and libraries.

Pickles name code, they do not hold it: a worker runs what its image has. `Versions` among the settings of a step is
compared where it is unpickled, before any step is built there, and a receipt counts only where its version is the
reader's (`rlhf.tuning.data.receipts`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[3]
ROOTS = ("rlhf.tuning.data.pipeline", "rlhf.tuning.data.merge_pipeline")
"""What workers run."""
LIBRARIES = ("apache-beam", "jinja2", "numpy", "pyarrow", "regex", "tokenizers", "transformers")
ABSENT = "absent"
_IMPORT = re.compile(r"^ *(?:from (rlhf[\w.]*) import (?:\(([^)]*)|(.*))|import (rlhf[\w.]*))", re.MULTILINE)


class OtherVersion(RuntimeError):
    """A worker has other code or libraries than the run; the message says which."""


class Versions(dict[str, str]):
    """By name of a module, a library or Python its version; unpickled only where all of them are the same."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[dict[str, str]]]:
        return compared, (dict(self),)

    @functools.cached_property
    def digest(self) -> str:
        """Of all of them."""
        return hashlib.sha256(json.dumps(self, sort_keys=True).encode()).hexdigest()[:16]


def compared(there: dict[str, str]) -> Versions:
    """The versions of this process, which have to be those of the run; raises OtherVersion."""
    mine = here()
    for name in sorted(there.keys() | mine.keys()):
        one, other = there.get(name, ABSENT), mine.get(name, ABSENT)
        if one != other:
            raise OtherVersion(
                f"{name} is {other} in this worker and {one} where the run is, so that it would make other rows: build "
                "the image of the workers again from the run's commit (on one machine, run again)"
            )
    return mine


@functools.cache
def here() -> Versions:
    """The versions of this process, as they are when it first asks."""
    found = Versions(Python=f"{sys.version_info.major}.{sys.version_info.minor}")
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ABSENT
    queue = list(ROOTS)
    while queue:
        name = queue.pop()
        path = None if name in found else _source(name)
        if path is not None:
            text = path.read_bytes()
            found[name] = hashlib.sha256(text).hexdigest()[:12]
            queue.extend(_imports(text.decode()))
    return found


def _imports(text: str) -> Iterator[str]:
    """Modules of this project that a source may import, and names that are none."""
    for module, several, line, alone in _IMPORT.findall(text):
        base = module or alone
        # Importing a.b.c runs a and a.b first.
        yield from (base.rsplit(".", n)[0] for n in range(base.count(".") + 1))
        yield from (f"{base}.{name}" for name in re.findall(r"\w+", several or line))


def _source(name: str) -> Path | None:
    path = PROJECT.joinpath(*name.split("."))
    return next((p for p in (path / "__init__.py", path.with_suffix(".py")) if p.is_file()), None)

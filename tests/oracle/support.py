"""How hypothesis runs here, and copies of the product that a test changes."""

import os
import shutil
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase

from tests.support import ROOT, copy_project

# The same examples each time: a failure is one of the change at hand. The product outlives them all.
COMMONLY: dict[str, Any] = {
    "derandomize": True,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    # An example takes seconds: a smaller one is not worth a hundred of them.
    "phases": [Phase.generate],
}

COPIED = ("tests/oracle", "tests/conftest.py", "tests/support.py", "tests/__init__.py")

Mutation = tuple[str, str, str]
"""A file, and what is replaced in it by what."""
JOURNAL: Mutation = (
    "stages/common/journal.py",
    "return [row.place, row.sample, sample.prompt, sample.completion, ids, sample.answer, sample.metadata]",
    "return [row.prompt_id, row.sample]",
)
"""Finished calls of a reward are kept by prompt and sample, so that a prompt's second place gets those of its first."""


def mutated(folder: Path, mutation: Mutation) -> dict[str, str]:
    """Copies the product to `folder` with the mutation in it. Returns the environment of a process that runs it."""
    packages = copy_project(folder)
    for part in COPIED:
        source, target = ROOT / part, folder / part
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    shutil.copy(ROOT / "pyproject.toml", folder)
    file, old, new = mutation
    text = (folder / file).read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}: the mutation does not fit any more"
    (folder / file).write_text(text.replace(old, new))
    return os.environ | {"PYTHONPATH": f"{packages}{os.pathsep}{folder}"}

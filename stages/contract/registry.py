"""The stages by name: modules `stages/NAME.py` or `stages/NAME/stage.py` with a `STAGE`."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

from rlhf.stages.contract.definition import Stage

_FOLDER = Path(__file__).parents[1]


@functools.cache
def modules() -> dict[str, str]:
    """Return the module of each stage by the stage's name, without importing them."""
    files = {p.stem: f"rlhf.stages.{p.stem}" for p in _FOLDER.glob("*.py") if p.stem != "__init__"}
    folders = {p.parent.name: f"rlhf.stages.{p.parent.name}.stage" for p in _FOLDER.glob("*/stage.py")}
    return dict(sorted((files | folders).items()))


@functools.cache
def stage(name: str) -> Stage:
    """Import and return the stage called `name`; raise KeyError with the known names."""
    if name not in modules():
        raise KeyError(f"no stage {name!r}; there are {', '.join(modules())}")
    definition: Stage = importlib.import_module(modules()[name]).STAGE
    return definition


@functools.cache
def by_section() -> dict[str, Stage]:
    """Return the stages that have a section in the recipe, by its dotted name."""
    # Stage modules import nothing heavy at the top.
    return {s.section: s for s in map(stage, modules()) if s.section}

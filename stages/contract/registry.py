"""The stages by name: each is a module `stages/NAME.py`, or a folder with `stages/NAME/stage.py`, that says `STAGE`."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

from rlhf.stages.contract.definition import Stage

_FOLDER = Path(__file__).parents[1]


@functools.cache
def modules() -> dict[str, str]:
    """The module of each stage by the stage's name. None of them is imported."""
    files = {p.stem: f"rlhf.stages.{p.stem}" for p in _FOLDER.glob("*.py") if p.stem != "__init__"}
    folders = {p.parent.name: f"rlhf.stages.{p.parent.name}.stage" for p in _FOLDER.glob("*/stage.py")}
    return dict(sorted((files | folders).items()))


@functools.cache
def stage(name: str) -> Stage:
    """The stage called `name`; its module is imported now. Raises KeyError with the known names."""
    if name not in modules():
        raise KeyError(f"no stage {name!r}; there are {', '.join(modules())}")
    definition = importlib.import_module(modules()[name]).STAGE
    if not isinstance(definition, Stage) or definition.name != name:
        raise TypeError(f"{modules()[name]}.STAGE is {definition!r}: expected a Stage named {name!r}")
    return definition


@functools.cache
def by_section() -> dict[str, Stage]:
    """The stages that have a section in the recipe, by its dotted name. Imports all stage modules, nothing heavy."""
    # Stage modules import nothing heavy at the top.
    stages = [stage(name) for name in modules()]
    return {s.section: s for s in stages if s.section}

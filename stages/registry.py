"""The stages by name. A stage's module is imported when it is asked for."""

from __future__ import annotations

import functools
import importlib

from stages.base import Stage

MODULES = {
    "base": "stages.base_model",
    "prepare": "stages.prepare",
    "sft": "stages.sft",
    "distill": "stages.distill",
    "preference": "stages.preference",
    "reward": "stages.reward",
    "rollout": "stages.rollout",
    "refill": "stages.refill",
    "greedy": "stages.greedy",
    "score": "stages.score",
    "update": "stages.update",
    "evaluate": "stages.evaluate",
    "export": "stages.export",
}


@functools.cache
def stage(name: str) -> Stage:
    """The stage called `name`. Raises KeyError with the known names."""
    if name not in MODULES:
        raise KeyError(f"no stage {name!r}; there are {', '.join(MODULES)}")
    module = importlib.import_module(MODULES[name])
    return Stage(name=module.NAME, module=MODULES[name], version=module.VERSION, config=module.Config, run=module.run)

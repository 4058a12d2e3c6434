"""Environments that come with the project, with records to train on and levels to compare with.

A module of this package has

    ENVIRONMENT    the class of a text environment (`rlhf.tuning.agents.contract`); None where tools alone make the
    episode records(seed=0, transcripts=..., prompts=..., heldout=..., **arguments)    raw records: a data source by its
    name levels(tasks, turns=None, **arguments)    success without learning on these tasks; harbor has neither

`arguments` are those of the class. Nothing draws from a global generator: a seed alone makes an episode.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType

NAMES = ("guess", "calculator", "frozenlake", "harbor")


class _Modules(Mapping[str, ModuleType]):
    """Modules by name, imported when they are asked for: a process of an environment needs one, and so does a key."""

    def __getitem__(self, name: str) -> ModuleType:
        if name not in NAMES:
            raise KeyError(name)
        return importlib.import_module(f"{__name__}.{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


BUILT_IN: Mapping[str, ModuleType] = _Modules()

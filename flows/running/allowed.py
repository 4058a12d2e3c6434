"""Refuses code and keys that a recipe names and RLHF_ALLOW_CODE does not allow (`rlhf.tuning.allowed`)."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.tuning import allowed

FUNCTION = re.compile(r"(?P<gym>gymnasium:)?(?P<module>[A-Za-z_][\w.]*):[A-Za-z_][\w.]*(?(gym)[\w./-]*)")
"""A function, or MODULE:ID of gymnasium, which imports the module."""
NAMING = (
    *("source", "sources", "function", "judge", "algorithm", "name", "tools", "rules", "renderer", "parser", "actions"),
)
"""Settings of any section whose texts may be `module:function`."""
OTHERS = ("random", "hub", "gem", "gymnasium", "textarena", "mcp")
"""Words before a colon that are not modules."""


def check_allowed(recipe: Recipe) -> None:
    """Raises RecipeError, with the place, for a module, program or key that is not allowed here."""
    if allowed.places() is None:
        return
    try:
        for place, name, value in _values(recipe.model_dump(mode="json"), "", ""):
            try:
                if isinstance(value, str):
                    _check_text(name, value)
                else:
                    place += ".key_variable"
                    variable, urls = value.get("key_variable"), value.get("url")
                    for url in urls if isinstance(urls, list) else [urls]:
                        if isinstance(variable, str) and isinstance(url, str):
                            allowed.check_key(variable, url)
            except allowed.NotAllowed as error:
                raise RecipeError(f"{place}: {error}") from error
        if recipe.environment is not None and recipe.environment.agent:
            allowed.check_program(recipe.environment.agent)
        if recipe.rl is not None and recipe.rl.rollout.engine.words:
            allowed.check_program(recipe.rl.rollout.engine.words)
    except allowed.NotAllowed as error:
        raise RecipeError(str(error)) from error
    cluster = None if recipe.workers is None else recipe.workers.cluster
    if cluster not in (None, "auto", os.environ.get("RAY_ADDRESS")):
        raise RecipeError(
            f"workers.cluster: {cluster} is not allowed here: {allowed.VARIABLE} is set, and RAY_ADDRESS of the worker "
            "is another address"
        )
    if recipe.data.runner.options:
        raise RecipeError(f"data.runner.options can name programs, which {allowed.VARIABLE} does not allow here")


def _check_text(name: str, text: str) -> None:
    """Raises NotAllowed for the text of a setting with this name."""
    function = FUNCTION.fullmatch(text)
    if name == "isolation":
        allowed.check_isolation(text)
    if name in NAMING and function and function["module"] not in OTHERS:
        allowed.check_module(function["module"])
    if name == "tools" and text.startswith("mcp:") and "://" not in text:
        allowed.check_program(shlex.split(text.removeprefix("mcp:")))


def _values(value: Any, place: str, name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (place, the nearest setting's name, value) of all texts and mappings of a recipe."""
    if isinstance(value, str | Mapping):
        yield place, name, value
    parts = value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, list) else {}
    for key, part in parts.items():
        yield from _values(part, f"{place}.{key}" if place else str(key), key if isinstance(key, str) else name)

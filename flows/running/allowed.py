"""Code and keys that a recipe names, where RLHF_ALLOW_CODE limits them (`rlhf.tuning.allowed`): refused before a
run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.tuning import allowed

FUNCTION = re.compile(r"(?P<gym>gymnasium:)?(?P<module>[A-Za-z_][\w.]*):[A-Za-z_][\w.]*(?(gym)[\w./-]*)")
"""Also MODULE:ID of gymnasium, which imports the module."""
NAMING = (
    *("source", "sources", "function", "judge", "algorithm", "name", "tools", "rules", "renderer", "parser", "actions"),
)
"""Settings whose texts may be `module:function`, whatever section they are in."""
OTHERS = ("random", "hub", "gem", "gymnasium", "textarena", "mcp")
"""What stands before a colon and is no module."""


def check_allowed(recipe: Recipe) -> None:
    """Raises RecipeError, with the place, for a module or a program that is not allowed here."""
    if allowed.places() is None:
        return
    values = recipe.model_dump(mode="json")
    for place, name, text in _texts(values, "", ""):
        named = FUNCTION.fullmatch(text)
        try:
            if name == "isolation":
                allowed.check_isolation(text)
            if name in NAMING and named and named["module"] not in OTHERS:
                allowed.check_module(named["module"])
            if name == "tools" and text.startswith("mcp:") and "://" not in text:
                allowed.check_program(shlex.split(text.removeprefix("mcp:")))
        except allowed.NotAllowed as error:
            raise RecipeError(f"{place}: {error}") from error
    try:
        if recipe.environment is not None and recipe.environment.agent:
            allowed.check_program(recipe.environment.agent)
        if recipe.rl is not None and recipe.rl.rollout.engine.words:
            allowed.check_program(recipe.rl.rollout.engine.words)
    except allowed.NotAllowed as error:
        raise RecipeError(str(error)) from error
    for place, variable, url in _keys(values, ""):
        try:
            allowed.check_key(variable, url)
        except allowed.NotAllowed as error:
            raise RecipeError(f"{place}key_variable: {error}") from error
    cluster = None if recipe.workers is None else recipe.workers.cluster
    if cluster not in (None, "auto", os.environ.get("RAY_ADDRESS")):
        raise RecipeError(
            f"workers.cluster: {cluster} is not allowed here: {allowed.VARIABLE} is set, and RAY_ADDRESS of the worker "
            "is another address"
        )
    if recipe.data.runner.options:
        raise RecipeError(f"data.runner.options can name programs, which {allowed.VARIABLE} does not allow here")


def _texts(value: Any, place: str, name: str) -> Iterator[tuple[str, str, str]]:
    """(place, the nearest setting's name, text) of all texts of a recipe."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts(one, f"{place}.{key}" if place else key, key)
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _texts(one, f"{place}.{number}", name)
    elif isinstance(value, str):
        yield place, name, value


def _keys(value: Any, place: str) -> Iterator[tuple[str, str, str]]:
    """(place, environment variable, URL that its value is sent to) of all judges and servers of a recipe."""
    if isinstance(value, list):
        value = {str(number): one for number, one in enumerate(value)}
    if isinstance(value, Mapping):
        variable, urls = value.get("key_variable"), value.get("url")
        for url in urls if isinstance(urls, list) else [urls]:
            if isinstance(variable, str) and isinstance(url, str):
                yield place, variable, url
        for key, one in value.items():
            yield from _keys(one, f"{place}{key}.")

"""A recipe as a command reads it: checked before any work, or a usage error."""

from __future__ import annotations

import re

from rlhf.flows.cli.shared import err, usage_error
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.running.recipe_warnings import of_recipe


def read_recipe(name: str, sets: list[str] | None) -> Recipe:
    """The recipe with its `--set` options, checked as far as that works without running it; else a usage error."""
    try:
        recipe = load_recipe(name, sets=sets)
        check(recipe)
        for line in of_recipe(recipe):
            err.print(f"! {line}")
        return recipe
    except RecipeError as e:
        raise usage_error(_with_option(str(e), sets or [])) from e
    except FileNotFoundError as e:
        raise usage_error(str(e)) from e


def _with_option(message: str, sets: list[str]) -> str:
    """A message that begins with a setting's place, with the option that set it."""
    places = [item.partition("=")[0] for item in sets]
    return f"--set {message}" if any(re.match(rf"{re.escape(place)}[.:\s]", message) for place in places) else message


def check(recipe: Recipe) -> None:
    """Raises RecipeError for a missing part of a recipe, or a function that cannot be called as it says."""
    from rlhf.flows.running.checks import check as check_names
    from rlhf.flows.running.checks import try_algorithm

    check_names(recipe)
    try_algorithm(recipe)

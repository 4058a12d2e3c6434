"""Read and check a recipe before any work."""

from __future__ import annotations

import re

from rlhf.flows.cli.shared import err, is_there, usage_error
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.running.recipe_warnings import of_recipe


def read_recipe(name: str, sets: list[str] | None) -> Recipe:
    """Return the recipe with its `--set` options, checked without running it; exit after an error."""
    try:
        recipe = load_recipe(name, sets=sets)
        if "://" in recipe.store:
            is_there(recipe.store)
        check(recipe)
        for line in of_recipe(recipe):
            err.print(f"! {line}")
        return recipe
    except RecipeError as e:
        message = str(e)
        # A message begins with a setting's place: add the option that set it.
        places = [re.escape(item.partition("=")[0]) for item in sets or []]
        option = "--set " if any(re.match(rf"{place}[.:\s]", message) for place in places) else ""
        raise usage_error(option + message) from e
    except FileNotFoundError as e:
        raise usage_error(str(e)) from e


def check(recipe: Recipe) -> None:
    """Raise RecipeError for a missing name of the recipe, or one that does not accept its arguments."""
    from rlhf.flows.running.checks import check as check_names
    from rlhf.flows.running.checks import try_algorithm

    check_names(recipe)
    try_algorithm(recipe)

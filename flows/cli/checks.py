"""A recipe as a command reads it: checked before any work, or a usage error."""

from __future__ import annotations

from flows.cli.shared import usage_error
from flows.recipe.model import Recipe, RecipeError
from flows.recipe.reading import load_recipe


def read_recipe(name: str, sets: list[str] | None) -> Recipe:
    """The recipe with its `--set` options, checked as far as that works without running it; else a usage error."""
    try:
        recipe = load_recipe(name, sets=sets)
        check(recipe)
        return recipe
    except (RecipeError, FileNotFoundError) as e:
        raise usage_error(str(e)) from e


def check(recipe: Recipe) -> None:
    """Raises RecipeError for what the recipe names and is not there, or cannot be called as it says."""
    from flows.running.checks import check as check_names
    from flows.running.checks import try_algorithm

    check_names(recipe)
    try_algorithm(recipe)

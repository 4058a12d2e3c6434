"""What tests of recipes share."""

import pytest

from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe


def refused(name: str, **options) -> str:
    """Why a recipe cannot be."""
    with pytest.raises(RecipeError) as e:
        load_recipe(name, **options)
    return str(e.value)

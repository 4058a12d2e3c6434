"""Random recipes on random tables: stage and oracle agree, or the recipe is refused when it is read."""

from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf.stages.update import stage as update
from rlhf.tuning.algorithms.registry import ALGORITHMS, presets
from tests.oracle.product import Product
from tests.oracle.rounds import COMMON, check_round
from tests.oracle.support import COMMONLY
from tests.oracle.tables import Drawn

pytestmark = pytest.mark.slow

# Few values of each setting: every new combination compiles a program.
RECIPES: dict[str, st.SearchStrategy[Any]] = {
    "algorithm": st.sampled_from(sorted(name for name, entry in ALGORITHMS.items() if not entry.turns)),
    "aggregation": st.sampled_from(["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"]),
    "constant": st.sampled_from([None, 7.0]),
    "normalisation": st.sampled_from(["std", "batch-std", "none"]),
    "kl_coef": st.sampled_from([0.0, 0.1]),
    "kl_kind": st.sampled_from(["k1", "k2", "k3", "k3-k2"]),
    "kl_in_reward": st.sampled_from([0.0, 0.2]),
    "kl_in_reward_kind": st.sampled_from(["k1", "k2", "k3"]),
    "kl_clamp": st.sampled_from([None, 0.5]),
    "entropy_coef": st.sampled_from([0.0, 0.05]),
    "correction": st.sampled_from(["none", "truncate", "mask", "sequence", "sequence-mask"]),
    "importance_max": st.sampled_from([1.2, 2.0]),
    "dual_clip": st.sampled_from([None, 1.5]),
    "truncated": st.sampled_from(["keep", "mask", "mask-loss"]),
    "tied_groups": st.sampled_from(["drop", "count"]),
    "epochs": st.sampled_from([1, 2]),
    "prompts_per_step": st.sampled_from([1, 2, 5]),
}
TOTALS = st.sampled_from([None, 0.0, 0.0, 0.5, 1.0])


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of an update: an algorithm, and a few of the others than its authors have them."""
    names = draw(st.sets(st.sampled_from(sorted(RECIPES.keys() - {"algorithm"})), max_size=5))
    recipe = {name: draw(RECIPES[name]) for name in ["algorithm", *sorted(names)]}
    # Without its pair either of the two is refused, which one example would show.
    if presets(recipe["algorithm"]).get("aggregation") == "constant" and "aggregation" not in recipe:
        recipe["constant"] = 7.0
    return recipe


@st.composite
def rounds(draw: st.DrawFn) -> list[Drawn]:
    """A round of up to five places: prompts that come twice, ragged groups, and every fate of a completion."""
    found = []
    for place in range(draw(st.integers(1, 5))):
        prompt = draw(st.integers(0, 3))
        for sample in range(draw(st.integers(1, 4))):
            length, truncated = draw(st.integers(0, 8)), draw(st.booleans())
            unseen = draw(st.integers(0, 9)) == 0
            found.append(Drawn(prompt, place, sample, length, draw(TOTALS), truncated and length > 0, unseen))
    return found


def check(product: Product, recipe: dict[str, Any], drawn: list[Drawn]) -> None:
    """Agreement on one recipe and table; a recipe that is refused says nothing."""
    try:
        update.Config.model_validate(COMMON | recipe)
    except ValidationError as error:
        note(f"refused: {error}")
        return
    check_round(f"{recipe}", product, recipe, drawn)


@settings(max_examples=4, **COMMONLY)
@given(drawn=rounds())
def test_tables(product: Product, drawn: list[Drawn]) -> None:
    """One recipe whose loss has every term, so that the examples share their programs."""
    recipe = {"algorithm": "grpo", "kl_coef": 0.1, "kl_in_reward": 0.1, "entropy_coef": 0.05, "truncated": "mask"}
    check(product, recipe | {"epochs": 2, "prompts_per_step": 8}, drawn)


@settings(max_examples=40, **COMMONLY)
@given(recipe=recipes(), drawn=rounds())
def test_recipes_and_tables(product: Product, recipe: dict[str, Any], drawn: list[Drawn]) -> None:
    check(product, recipe, drawn)

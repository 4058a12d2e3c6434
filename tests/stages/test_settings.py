"""Settings of an optimizer may be written one level up."""

import pytest

from flows.recipe import RecipeError, load_recipe
from stages.sft import Config


def test_the_short_form_is_the_long_form():
    short = load_recipe("demo", sets=["sft.learning_rate=0.0002"])
    long = load_recipe("demo", sets=["sft.optimizer.learning_rate=0.0002"])
    assert short == long
    assert short.sft.optimizer.schedule == "linear"


def test_what_the_short_form_leaves_out_keeps_the_stages_default():
    found = Config.model_validate_json('{"learning_rate": 0.5}')
    assert found.optimizer.learning_rate == 0.5
    assert found.optimizer.warmup_steps == Config().optimizer.warmup_steps


def test_the_short_form_is_as_strict():
    with pytest.raises(RecipeError, match="learning_rate"):
        load_recipe("demo", sets=["sft.learning_rate=-1"])
    with pytest.raises(RecipeError, match="unknown key"):
        load_recipe("demo", sets=["sft.learn_rate=1"])

"""Settings of an optimizer may be written one level up, and are as strict there."""

import pytest

from flows.recipe.model import RecipeError
from flows.recipe.reading import load_recipe
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


@pytest.mark.parametrize(
    ("stage", "optimizer", "message"),
    [
        ("sft", "{name: adan}", "'adamw', 'adam', 'nadamw'"),
        ("sft", "{name: adam, weight_decay: 0.1}", "weight_decay has no meaning with adam; that is adamw"),
        ("sft", "{name: lion, epsilon: 0.1}", "epsilon has no meaning with lion"),
        ("sft", "{schedule: constant, end_fraction: 0.1}", "end_fraction has no meaning with schedule constant"),
        ("rl.update", "{schedule: cosine}", "needs optimizer.decay_steps"),
        ("rl.update.critic", "{schedule: linear}", "needs optimizer.decay_steps"),
    ],
)
def test_what_an_optimizer_refuses(stage, optimizer, message):
    recipe = "ppo" if "critic" in stage else "demo"
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe, sets=[f"{stage}.optimizer={optimizer}"])


def test_rules_have_defaults_of_their_own():
    assert load_recipe("demo", sets=["sft.optimizer={name: lion}"]).sft.optimizer.beta2 == 0.99
    assert load_recipe("demo", sets=["sft.optimizer.name=sgd"]).sft.optimizer.beta1 == 0.0
    assert load_recipe("demo", sets=["sft.optimizer={name: muon, beta1: 0.9}"]).sft.optimizer.beta1 == 0.9
    found = load_recipe("demo", sets=["rl.update.optimizer={schedule: cosine, decay_steps: 96}"])
    assert found.rl.update.optimizer.decay_steps == 96


def test_tokens_per_step_stands_beside_the_recipe_s_examples_per_step():
    recipe = load_recipe("smoke", sets=["sft.tokens_per_step=256"])
    assert recipe.sft.tokens_per_step == 256
    # As a worker gets it: with every field written out.
    assert type(recipe.sft).model_validate_json(recipe.sft.model_dump_json()) == recipe.sft

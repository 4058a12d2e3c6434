"""Settings of an optimizer may be written one level up, and are as strict there."""

import pytest

from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.contract.registry import by_section
from rlhf.stages.sft import Config


def test_the_short_form_is_the_long_form():
    short = load_recipe("demo", sets=["sft.learning_rate=0.0002"])
    long = load_recipe("demo", sets=["sft.optimizer.learning_rate=0.0002"])
    assert short == long
    assert short.sft.optimizer.schedule == "linear"


def test_the_clip_range_of_trl_is_no_setting_of_the_optimizer():
    with pytest.raises(RecipeError, match=r"rl.update.epsilon: unknown key; did you mean rl.update.clip_low"):
        load_recipe("demo", sets=["rl.update.epsilon=0.2"])


def test_what_the_short_form_leaves_out_keeps_the_stages_default():
    found = Config.model_validate_json('{"learning_rate": 0.5}')
    assert found.optimizer.learning_rate == 0.5
    assert found.optimizer.warmup_steps == Config().optimizer.warmup_steps


@pytest.mark.parametrize(
    ("section", "full", "adapter"),
    [
        ("sft", 2e-5, 2e-4),
        ("preference", 1e-6, 1e-5),
        ("reward", 3e-5, 3e-4),
        ("distill", 2e-5, 2e-4),
        ("rl.update", 1e-6, 1e-5),
        ("rl.update.critic", 1e-5, 1e-4),
    ],
)
def test_an_adapters_default_rate_is_ten_times_that_of_all_parameters(section, full, adapter):
    """TRL: sft.py 2e-5 and 2e-4, dpo.py 5e-7 and 5e-6, reward_modeling.py 1e-5 and 1e-4; GRPO and RLOO 1e-6."""
    algorithm = {"algorithm": "ppo"} if "critic" in section else {}
    stage = by_section()[section.removesuffix(".critic")]

    def rate(lora, **more):
        found = stage.config.model_validate(algorithm | {"lora": lora} | more)
        return (found.critic if "critic" in section else found).optimizer.learning_rate

    assert (rate(None), rate({"rank": 4})) == (full, adapter)
    if "critic" in section:
        for critic in ({"learning_rate": 0.5}, {"optimizer": {"learning_rate": 0.5}}):
            assert rate({"rank": 4}, critic=critic) == 0.5
    else:
        assert rate({"rank": 4}, learning_rate=0.5) == rate({}, optimizer={"learning_rate": 0.5}) == 0.5
        assert rate({"rank": 4}, optimizer={"beta1": 0.5}) == adapter


def test_the_short_form_is_as_strict():
    with pytest.raises(RecipeError, match="learning_rate"):
        load_recipe("demo", sets=["sft.learning_rate=-1"])
    with pytest.raises(RecipeError, match="unknown key"):
        load_recipe("demo", sets=["sft.learn_rate=1"])


@pytest.mark.parametrize(
    ("stage", "optimizer", "message"),
    [
        ("sft", "{name: adan}", "'adamw', 'adam', 'nadamw'"),
        ("sft", "{name: adam, weight_decay: 0.1}", "weight_decay has no meaning with name adam; it belongs to adamw, "),
        ("sft", "{name: lion, epsilon: 0.1}", "epsilon has no meaning with name lion"),
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

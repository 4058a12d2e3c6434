"""What a stage says of itself: its place in a recipe, its inputs, its figures, and the words of its settings."""

import pytest

from rlhf.flows.recipe.model import Recipe
from rlhf.flows.recipe.overrides import partial
from rlhf.stages.common.settings import Optimizer
from rlhf.stages.contract.definition import Stage, StageConfig
from rlhf.stages.contract.field_docs import field_docs
from rlhf.stages.contract.registry import by_section, modules, stage
from rlhf.stages.sft import Config
from rlhf.tuning.settings import OptimizerSettings

# The graph itself gives these roles: other policies, the base model's tokenizer, scores of a round's other tables, the
# scores that set their scale, the policy that a run goes on from, and what a gate compares and has audited.
OF_THE_GRAPH = {"base", "tokenizer", "teacher", "reference", "greedy_scores", "scale"}
OF_THE_GRAPH |= {"start", "champion", "candidate", "against", "node_*"}
OF_THE_GRAPH |= {"refill_*", "candidate_*", "evaluation_*", "scorer_*"}


def test_every_section_is_one_of_the_recipe_and_holds_the_settings_of_its_stage():
    recipe = Recipe.model_validate({"distill": {}, "preference": {}, "reward": {}, "gate": {}})
    for section, found in by_section().items():
        # Of data the recipe knows more than the stage; a gate is told more of the run than its section says.
        here, there = type(recipe.settings(section)), found.config
        assert issubclass(here, there) or issubclass(there, here), section
    assert {s.section for s in map(stage, modules())} == {*by_section(), ""}


def test_every_role_that_a_stage_reads_is_made():
    stages = [stage(name) for name in modules()]
    read = {reads.role for s in stages for reads in s.reads.values()}
    assert read - OF_THE_GRAPH <= {s.makes for s in stages}


@pytest.mark.parametrize(
    ("name", "metrics", "shown"),
    [
        ("base", {"parameters": 134_515_008}, "134.5 M parameters"),
        ("prepare", {"rows": {"sft": 3, "prompts": 4}}, "sft 3  prompts 4"),
        ("reward", {"loss": 0.5}, "loss 0.5000"),
        ("reward", {"loss": 0.5, "heldout_accuracy": 0.75, "calibration_error": 0.1},
         "loss 0.5000  held-out accuracy 0.750  calibration error 0.100"),
        ("distill", {"loss": 1, "heldout_divergence_before": 2.0, "heldout_divergence": 1.5},
         "loss 1.0000  held-out divergence 2.000 -> 1.500"),
        ("score", {"reward": 0.35, "reward_model": 0.1, "reward_exact": 0.25, "zero_variance": 0.5, "failed": 0.0},
         "reward 0.350  exact 0.250  model 0.100  zero-var 0.50"),
        ("score", {"reward": 4.5, "reward_length": 4.5, "zero_variance": 0.5, "unscored": 0.25},
         "reward 4.500  no reward applies 0.25  zero-var 0.50"),
        ("score", {"reward": None, "reward_j": None, "zero_variance": None, "failed": 1.0,
                   "failures": {"j: RuntimeError: boom": 32, "j: timeout after 1 s": 1}},
         "reward none  failed 1.00 (j: RuntimeError: boom)"),
        ("export", {"bytes": 5.4e8}, "540.0 MB"),
    ],
)  # fmt: skip
def test_figures_are_those_whose_metrics_are_there(name, metrics, shown):
    assert stage(name).figures(metrics) == shown


def test_a_stage_without_a_headline_shows_nothing():
    assert Stage("x", 1, StageConfig, lambda ctx: {}).figures({"loss": 1.0}) == ""


def test_a_setting_that_stands_in_the_core_has_the_words_of_the_core():
    assert field_docs(Optimizer)["learning_rate"] == field_docs(OptimizerSettings)["learning_rate"]
    assert field_docs(Config)["epochs"]


def test_a_class_without_docstrings_has_those_of_its_base():
    class Narrow(Config):
        epochs: int = 1

    assert field_docs(Narrow) == field_docs(Config)


def test_every_setting_has_its_words_in_the_form_of_prefect():
    models = partial(Recipe).model_json_schema()["$defs"]
    fields = [(model, name, field) for model, one in models.items() for name, field in one["properties"].items()]
    assert [(model, name) for model, name, field in fields if not field.get("description")] == []

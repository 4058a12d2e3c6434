"""What docstrings below fields say: of every setting, and of a class before its bases."""

from rlhf.flows.recipe.model import Recipe
from rlhf.flows.recipe.overrides import partial
from rlhf.stages.common.settings import Optimizer
from rlhf.stages.contract.field_docs import field_docs
from rlhf.stages.sft import Config
from rlhf.tuning.settings import OptimizerSettings


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

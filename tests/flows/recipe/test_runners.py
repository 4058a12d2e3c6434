"""Runners of a recipe: the examples for clusters are read, and what cannot work is refused by name before a run."""

from pathlib import Path

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.tuning.data import runners

EXAMPLES = sorted((Path(__file__).parents[3] / "infra" / "runners").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_recipe_whose_options_beam_takes(path):
    data = load_recipe(str(path)).data
    runner = data.beam_runner()
    found = PipelineOptions(runners.flags_of(runner)).get_all_options()
    assert found["runner"] == runner.name == data.runner.name
    for name, value in data.runner.options.items():
        assert found[name] == value, name


def test_there_is_an_example_of_each_cluster():
    names = {load_recipe(str(path)).data.runner.name for path in EXAMPLES}
    assert names == set(runners.CLUSTERS) - {"PortableRunner"}


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["name=PrismRunner"], "no runner 'PrismRunner'"),
        (["name=FlinkRuner"], "no runner 'FlinkRuner'; did you mean FlinkRunner"),
        (["name=SparkRunner"], "set runner.scratch to a URL"),
        (["name=SparkRunner", "scratch=/tmp/x"], "set runner.scratch to a URL"),
        (["options.flink_mastr=x"], "no pipeline option 'flink_mastr'; did you mean flink_master"),
        (["options.use_public_ips=false"], "remove it instead of setting false, or set no_use_public_ips"),
        (["options.direct_num_workers=3"], "direct_num_workers follows from"),
    ],
)
def test_what_cannot_work_is_refused_when_the_recipe_is_read(sets, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("smoke", sets=[f"data.runner.{item}" for item in sets])


def test_workers_are_of_this_machine_alone():
    with pytest.raises(RecipeError, match="counts processes of this machine"):
        load_recipe(str(EXAMPLES[0]), sets=["data.workers=2"])

"""A gate that could not decide is refused when the recipe is read, with the setting that is wrong."""

import pytest

from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["gate={}", "evaluate=null"], "gate decides by evaluations, and the section evaluate is null"),
        (["gate.first=rl"], "gate.first 'rl': expected an earlier policy of the run, or promote: promote, base, sft"),
        (["gate.first=preference"], "gate.first 'preference': expected an earlier policy"),
        (["gate.metric=pass_at_2"], "gate.metric 'pass_at_2' has no value for each problem"),
        (["gate.floors={scoer: 0.5}"], "gate.floors.scoer is no metric of an evaluation; did you mean score?"),
        (["gate.guards={mean_lenght: {most: 3}}"], "gate.guards.mean_lenght is no metric of an evaluation"),
        (["gate.guards={truncated: {}}"], "a guard without a bound guards nothing"),
        (["gate.confidence=1"], "gate.confidence"),
        (["gate.against=base"], "gate.against: unknown key"),
        (["gate={}", "data.new_since=champion"], "set start_from: champion"),
        (["start_from=Best"], "start_from"),
    ],
)
def test_what_could_not_decide_is_named(sets, message):
    with pytest.raises(RecipeError) as e:
        load_recipe("smoke", sets=sets)
    assert message in str(e.value)


def test_metrics_of_an_evaluation_and_its_judges_have_bounds():
    judges = "evaluate.judges={safe: {function: matches, arguments: {pattern: a}}}"
    bounds = ["gate.floors={safe: 0.9, pass_at_2: 0.1}", "gate.guards={mean_length: {times: 1.5}, safe: {fall: 0.01}}"]
    recipe = load_recipe("smoke", sets=[judges, "gate.metric=safe", *bounds])
    assert recipe.gate.guards["mean_length"].times == 1.5 and recipe.gate.metric == "safe"
    assert load_recipe("smoke").gate is None

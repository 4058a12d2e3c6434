"""The numbers of a run's rounds: what is called a pass rate is one, and failures come with their reason."""

import pytest

from rlhf.flows.report.advice import run_warnings
from rlhf.flows.report.measures import judged_reward, round_series


def recipe(judge="exact_match", **functions):
    return {
        "evaluate": {"judge": judge},
        "rl": {"score": {"rewards": {name: {"function": f} for name, f in functions.items()}}},
    }


def record(recipe, *scores):
    nodes = {f"round-{i:03d}.score": {"metrics": metrics} for i, metrics in enumerate(scores)}
    return {"recipe": recipe, "nodes": nodes}


def test_the_judge_is_the_pass_rate_or_a_built_in_check_and_nothing_else():
    assert judged_reward(recipe(a="mine:f", b="exact_match", c="number_match")) == "b"
    assert judged_reward(recipe("mine:f", a="mine:f", b="exact_match")) == "a"
    assert judged_reward(recipe(a="mine:f", c="reward_model", b="number_match")) == "b"
    assert judged_reward(recipe(a="mine:f", c="reward_model")) is None


@pytest.mark.parametrize(("value", "rates"), [(0.5, [0.25, 0.5]), (4.5, [None, None])])
def test_the_mean_of_a_judge_that_gives_other_numbers_is_no_pass_rate(value, rates):
    series = round_series(record(recipe("mine:f", a="mine:f"), {"reward_a": 0.25}, {"reward_a": value}))
    assert series["pass_rate"] == rates and series["reward_a"] == [0.25, value]


def test_failed_rewards_are_told_with_the_commonest_reason():
    failed = {"failed": 0.2, "failures": {"j: boom": 3, "j: timeout": 1}}
    (warning,) = run_warnings(record(recipe(a="mine:f"), {"failed": 0.05}, failed), {}, {}, {})
    assert warning.title == "Rewards failed"
    assert "on 20.0 % of the completions, most often with “j: boom”." in warning.text
    assert run_warnings(record(recipe(a="mine:f"), {"failed": 0.0, "failures": {}}), {}, {}, {}) == []

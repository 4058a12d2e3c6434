"""What a policy was trained on is what it has learned from, whatever was learned beside it."""

import pytest

from rlhf.stages.common.trained_prompts import prompts_among, trained_names
from tests.stages.gate.support import Lab


@pytest.fixture
def rounds(tmp_path):
    """Policies of two rounds, each with prompts of its own; and makes the choice of one of them."""
    lab = Lab(tmp_path)
    one = lab.commit("rewarded", {"policy.json": "one"}, {"data": lab.data(1, ["a", "b"])})
    two = lab.commit("rewarded", {"policy.json": "two"}, {"data": lab.data(1, ["c"]), "policy": one})

    def choice(number):
        inputs = {"candidate_000": one, "candidate_001": two, "evaluation_000": lab.commit("evaluate", {"of": "one"})}
        return lab.commit("select", {"policy.json": "chosen"}, inputs, metrics={"round": number})

    return one, two, choice


def test_the_best_of_several_rounds_was_trained_on_what_its_round_and_those_before_it_saw(rounds):
    one, two, choice = rounds
    assert trained_names(choice(0)) == trained_names(one) and prompts_among(trained_names(one)) == 2
    assert trained_names(choice(1)) == trained_names(two) and prompts_among(trained_names(two)) == 3

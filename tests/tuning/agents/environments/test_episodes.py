"""Episodes of built-in environments follow from seed and actions alone, and say what was wrong with an action."""

import json
import random

import pytest

from rlhf.tuning.agents.environments import BUILT_IN
from rlhf.tuning.agents.environments.frozenlake import FrozenLake, Lake
from rlhf.tuning.agents.environments.guess import Guess

VARIANTS = {
    "guess": {},
    "guess-hard": {"high": 15, "guesses": 4},
    "frozenlake": {},
    "frozenlake-large": {"rows": 4, "holes": 3, "moves": 9},
}


def made(variant):
    return BUILT_IN[variant.partition("-")[0]].ENVIRONMENT(**VARIANTS[variant])


def play(environment, seed, choices):
    """Everything that an episode said, under moves that `choices` draws."""
    said = [environment.reset(seed=seed)]
    while len(said) == 1 or not (said[-1][2] or said[-1][3]):
        said.append(environment.step(choices.choice(environment.moves())))
    return json.loads(json.dumps(said))


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_episode_is_the_same_alone_and_among_others(variant):
    alone = [play(made(variant), seed, random.Random(seed)) for seed in range(12)]
    state = random.getstate()
    among = [(made(variant), random.Random(seed)) for seed in range(12)]
    said = [[json.loads(json.dumps(e.reset(seed=seed)))] for seed, (e, _) in enumerate(among)]
    going = set(range(12))
    while going:
        for seed in sorted(going, reverse=True):
            environment, choices = among[seed]
            said[seed].append(json.loads(json.dumps(environment.step(choices.choice(environment.moves())))))
            going -= {seed} if said[seed][-1][2] or said[seed][-1][3] else set()
    assert said == alone
    assert random.getstate() == state
    # A second episode in the same environment keeps nothing of the first.
    again = made(variant)
    assert [play(again, seed, random.Random(seed)) for seed in range(12)] == alone


@pytest.mark.parametrize("variant", VARIANTS)
def test_episodes_end_with_a_success_or_without_one(variant):
    ends = {True: 0, False: 0}
    for seed in range(60):
        last = play(made(variant), seed, random.Random(f"ends {seed}"))[-1]
        ends[last[4]["success"]] += 1
        assert (last[1] >= 1.0) == last[4]["success"] and (last[2] or last[4]["success"] is False)
    assert min(ends.values()) > 0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("text", ["", "I do not know", "up down left 1 2", "99", "-1", "٣", "1" * 5000])
def test_a_malformed_action_is_told_and_costs_a_turn(variant, text):
    environment = made(variant)
    _, info = environment.reset(seed=1)
    before, valid = info["state"], environment.moves()
    turns, ended = 0, False
    while not ended:
        observation, reward, terminated, truncated, info = environment.step(text)
        turns, ended = turns + 1, terminated or truncated
        assert info["valid"] is False and info["action"] is None and info["success"] is False and reward == 0.0
        assert "Not valid" in observation and valid[0] in observation and valid[-1] in observation
    limit = environment.guesses if variant.startswith("guess") else environment.limit
    assert turns == limit
    if not variant.startswith("guess"):
        assert info["state"] == before
    with pytest.raises(RuntimeError, match="reset first"):
        environment.step(valid[0])


@pytest.mark.parametrize("text", ["4", "I say 4.", "**4**\n", "My guess: 4!"])
def test_a_guess_may_stand_in_a_sentence(text):
    environment = Guess()
    environment.reset(seed=3)
    assert environment.step(text)[:3] == ("correct", 1.0, True)


def test_guesses_are_answered_and_narrow_what_is_known():
    environment = Guess()
    assert environment.reset(seed=7 * 5 + 5)[1]["state"] == {"low": 1, "high": 7, "left": 3}
    assert environment.step("4") == (
        "higher", 0.0, False, False,
        {"state": {"low": 5, "high": 7, "left": 2}, "action": 4, "valid": True, "success": False},
    )  # fmt: skip
    assert environment.step("7")[0] == "lower"
    text, reward, terminated, truncated, info = environment.step("6")
    assert (text, reward, terminated, truncated, info["success"]) == ("correct", 1.0, True, False, True)


def test_the_policy_reads_the_way_to_the_goal_and_the_holes_next_to_its_cell():
    lake = FrozenLake(rows=2, columns=2, holes=1, moves=4)
    seed = next(s for s in range(1000) if lake.lake(s) == Lake((1, 1), (2, 2), ((1, 2),)))
    assert lake.reset(seed=seed)[0] == "Goal right down. Hole right. Answer with up, down, left or right."
    # The border stops a step.
    assert lake.step("UP!")[0] == "Goal right down. Hole right." and lake.step("down")[0] == "Goal right. Hole none."
    assert lake.step("I go right.")[:3] == ("You are at the goal.", 1.0, True)
    lake.reset(seed=seed)
    assert lake.step("right")[:3] == ("You fell into a hole.", 0.0, True)
    lake.reset(seed=seed)
    # Without moves left it is lost, which is an end and no cut.
    assert [lake.step("up")[2:4] for _ in range(4)] == [(False, False)] * 3 + [(True, False)]


@pytest.mark.parametrize(
    ("environment", "arguments", "named"),
    [
        (Guess, {"high": 1}, "guess: argument high must be in 2..1000000, got 1"),
        (FrozenLake, {"rows": 5}, "frozenlake: argument rows must be in 2..4, got 5"),
        (FrozenLake, {"holes": 5}, "holes must be in 0..4, got 5"),
        (FrozenLake, {"moves": 3}, "moves must be in 4..100, got 3"),
    ],
)
def test_arguments_that_do_not_fit_are_named(environment, arguments, named):
    with pytest.raises(ValueError, match="argument") as error:
        environment(**arguments)
    assert named in str(error.value)

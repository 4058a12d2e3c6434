"""Levels are what play reaches: known figures, all sequences tried one by one, and episodes played at random."""

import itertools
import random

import pytest

from rlhf.tuning.agents.contract import Task
from rlhf.tuning.agents.environments import BUILT_IN, frozenlake
from rlhf.tuning.agents.environments.frozenlake import FrozenLake


def tasks(count, first=0):
    return [Task(seed) for seed in range(first, first + count)]


def test_guess_has_the_levels_of_arithmetic():
    levels = BUILT_IN["guess"].levels(tasks(70))
    assert levels.random == pytest.approx(1 - (6 / 7) ** 3) and levels.random == pytest.approx(0.370, abs=5e-4)
    assert levels.blind == pytest.approx(3 / 7) and levels.optimal == 1.0 and levels.exact
    hard = BUILT_IN["guess"].levels(tasks(60), high=15, guesses=4)
    assert hard.blind == pytest.approx(4 / 15) and hard.optimal == 1.0
    # Too few turns for all: one guess finds one number, two find three.
    assert BUILT_IN["guess"].levels(tasks(7), turns=1).optimal == pytest.approx(1 / 7)
    assert BUILT_IN["guess"].levels(tasks(7), turns=2).optimal == pytest.approx(3 / 7)
    # Tasks that hide one number more often than others are a gift to the blind.
    assert BUILT_IN["guess"].levels([*tasks(7), Task(0), Task(7), Task(14)]).blind == pytest.approx(6 / 10)


def best_sequence(environment, seeds, moves, length):
    """The success of the best of all sequences of moves, each played on every seed."""

    def won(seed, sequence):
        environment.reset(seed=seed)
        for move in sequence:
            _, reward, terminated, truncated, _ = environment.step(move)
            if terminated or truncated:
                return reward
        return 0.0

    return max(
        sum(won(seed, sequence) for seed in seeds) / len(seeds) for sequence in itertools.product(moves, repeat=length)
    )


def test_the_blind_level_is_that_of_the_best_of_all_sequences():
    arguments = {"rows": 2, "holes": 1, "moves": 4}
    levels = BUILT_IN["frozenlake"].levels(tasks(12), **arguments)
    best = best_sequence(FrozenLake(**arguments), range(12), ("up", "down", "left", "right"), 4)
    assert levels.exact and levels.blind == pytest.approx(best) and 0 < best < 1 == levels.optimal


@pytest.mark.parametrize(
    ("name", "arguments"), [("guess", {}), ("frozenlake", {}), ("frozenlake", {"rows": 2, "moves": 8})]
)
def test_random_play_reaches_the_random_level(name, arguments):
    """Four standard errors of 1000 episodes, under fixed draws."""
    environment, count, seeds = BUILT_IN[name].ENVIRONMENT(**arguments), 1000, 20
    expected = BUILT_IN[name].levels(tasks(seeds) if name != "guess" else tasks(21), **arguments).random
    rng, won = random.Random("levels"), 0
    for number in range(count):
        environment.reset(seed=number if name == "guess" else number % seeds)
        ended = False
        while not ended:
            _, _, terminated, truncated, info = environment.step(rng.choice(environment.moves()))
            ended = terminated or truncated
        won += info["success"]
    assert abs(won / count - expected) < 4 * (expected * (1 - expected) / count) ** 0.5


def test_fewer_turns_lower_the_levels():
    more = BUILT_IN["frozenlake"].levels(tasks(10), moves=8)
    fewer = BUILT_IN["frozenlake"].levels(tasks(10), moves=8, turns=3)
    assert fewer.optimal < more.optimal == 1.0


def test_a_search_that_is_cut_short_is_a_lower_bound(monkeypatch):
    whole = BUILT_IN["frozenlake"].levels(tasks(12))
    monkeypatch.setattr(frozenlake, "SEQUENCES", 3)
    short = BUILT_IN["frozenlake"].levels(tasks(12))
    assert whole.exact and not short.exact and 0 < short.blind <= whole.blind
    assert (short.random, short.optimal) == (whole.random, whole.optimal)


def test_products_have_the_levels_of_their_answers():
    answers = [Task(0, {"answer": answer}) for answer in ("600", "600", "391", "1023")]
    levels = BUILT_IN["calculator"].levels(answers)
    assert levels.blind == 0.5 and levels.optimal == 1.0 and levels.random == pytest.approx(1 / 9702)
    with pytest.raises(ValueError, match="task 1 of 1 has no answer"):
        BUILT_IN["calculator"].levels([Task(0)])


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_levels_want_tasks(name):
    with pytest.raises(ValueError, match="there are none"):
        BUILT_IN[name].levels([])

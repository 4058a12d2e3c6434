"""Levels are what play reaches: known figures, all sequences tried one by one, and episodes played at random."""

import itertools
import random
from fractions import Fraction

import pytest

from tuning.agents.contract import Task
from tuning.agents.environments import BUILT_IN, search
from tuning.agents.environments.frozenlake import FrozenLake
from tuning.agents.environments.guess import Guess


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


def test_optimal_guesses_halve_what_is_left():
    for seed in range(7):
        environment = Guess()
        state = environment.reset(seed=seed)[1]["state"]
        ended = False
        while not ended:
            _, reward, ended, _, info = environment.step(str((state["low"] + state["high"]) // 2))
            state = info["state"]
        assert reward == 1.0


def one_task_of_each_map(**arguments):
    rules = FrozenLake(**arguments).rules
    return [Task(seed) for seed in {rules.lake(seed): seed for seed in range(800)}.values()]


@pytest.mark.parametrize(
    ("arguments", "maps", "blind", "chance"),
    [
        ({"rows": 2, "columns": 2, "holes": 1, "moves": 4}, 2, Fraction(1, 2), 0.176),
        ({"holes": 1, "moves": 6}, 7, Fraction(4, 7), 0.047),
        ({"holes": 2, "moves": 6}, 19, Fraction(6, 19), 0.0255),
    ],
)
def test_lakes_have_the_levels_of_their_maps(arguments, maps, blind, chance):
    """A fixed shortest path of 3x3 crosses three of the seven cells that may be holes: 4 of 7 single holes and 6 of the
    19 pairs that leave a path are elsewhere."""
    each = one_task_of_each_map(**arguments)
    assert len(each) == maps
    levels = BUILT_IN["frozenlake"].levels(each, **arguments)
    assert levels.blind == pytest.approx(float(blind)) and levels.exact and levels.optimal == pytest.approx(1.0)
    assert levels.random == pytest.approx(chance, abs=1e-3)


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


@pytest.mark.parametrize(
    ("name", "arguments", "length", "seeds"),
    [
        ("frozenlake", {"rows": 2, "columns": 3, "holes": 1, "moves": 4, "corners": False}, 4, range(12)),
    ],
)
def test_the_blind_level_is_that_of_the_best_of_all_sequences(name, arguments, length, seeds):
    environment = BUILT_IN[name].ENVIRONMENT(**arguments)
    levels = BUILT_IN[name].levels([Task(seed) for seed in seeds], **arguments)
    best = best_sequence(environment, seeds, ("up", "down", "left", "right"), length)
    assert levels.exact and levels.blind == pytest.approx(best) and 0 < best < 1 == levels.optimal


def test_the_blind_level_counts_chance_by_its_probability():
    arguments = {"rows": 2, "columns": 2, "holes": 1, "moves": 4, "slip": 0.4}
    rules = FrozenLake(**arguments).rules
    levels = BUILT_IN["frozenlake"].levels(tasks(4), **arguments)

    def expected(state, sequence):
        value = rules.value(state)
        if value is not None or not sequence:
            return value or 0.0
        follows = rules.after(state, sequence[0])
        return sum(o.probability * expected(o.state, sequence[1:]) for o in follows)

    starts = [(o.probability / 4, o.state) for seed in range(4) for o in rules.start(seed)]
    best = max(
        sum(share * expected(state, sequence) for share, state in starts)
        for sequence in itertools.product(rules.moves(starts[0][1]), repeat=4)
    )
    assert levels.exact and levels.blind == pytest.approx(best)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("guess", {}),
        ("frozenlake", {"corners": False}),
        ("frozenlake", {"slip": 0.4, "moves": 8}),
    ],
)
def test_random_play_reaches_the_random_level(name, arguments):
    """Four standard errors of 1500 episodes, under fixed draws."""
    environment, count, seeds = BUILT_IN[name].ENVIRONMENT(**arguments), 1500, 20
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
    assert fewer.optimal == 0.0 < more.optimal
    assert BUILT_IN["frozenlake"].levels(tasks(10), moves=8, turns=4, together=2) == more


def test_a_search_that_is_cut_short_is_a_lower_bound():
    rules, each = FrozenLake().rules, tasks(12)
    short, whole = search.levels(rules, each, 6, nodes=3), search.levels(rules, each, 6)
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


def test_unknown_arguments_are_named():
    with pytest.raises(ValueError, match="frozenlake: no argument row; there are rows, columns"):
        BUILT_IN["frozenlake"].levels(tasks(1), row=3)

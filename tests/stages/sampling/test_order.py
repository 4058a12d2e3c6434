"""Passes over the prompts: each prompt once in each, whatever rounds and refills there are (R22)."""

import itertools
from collections import Counter

import grain.python as grain
import pytest

from rlhf.flows.graph.build import build
from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.sampling.order import positions, prompts_of_refill, prompts_of_round


def rollouts(*sets):
    nodes = build(load_recipe("demo", sets=[*sets]))
    return [n for n in nodes if n.stage == "rollout"], [n for n in nodes if n.stage == "refill"]


@pytest.mark.slow
@pytest.mark.parametrize(("total", "count"), [(128, 32), (100, 32), (7, 16), (5, 5), (1, 3)])
def test_after_any_round_of_a_run_counts_of_prompts_differ_by_at_most_one(total, count):
    nodes, _ = rollouts(f"rl.rollout.prompts={count}", "rl.update.prompts_per_step=1", "rl.rounds=12")
    drawn = Counter(range(total))
    for node in nodes:
        config = node.config
        drawn.update(prompts_of_round(config.prompts, total, config.round, config.order_seed))
        assert max(drawn.values()) - min(drawn.values()) <= 1
    assert sum(drawn.values()) == total + 12 * count


def test_orders_differ_by_pass_and_by_run_and_samples_by_round():
    nodes, _ = rollouts("rl.rounds=3")
    others, _ = rollouts("rl.rounds=3", "seed=8")
    (seed,), (other,) = ({node.config.order_seed for node in group} for group in (nodes, others))
    assert len({node.seed for node in nodes}) == 3
    first, second, third = (prompts_of_round(50, 50, *which) for which in ((0, seed), (1, seed), (0, other)))
    assert sorted(first) == sorted(second) == sorted(third) == list(range(50))
    assert first != second and first != third
    kept, _ = rollouts("rl.rounds=1", "seed=8", f"rl.rollout.order_seed={seed}")
    assert kept[0].config.order_seed == seed and kept[0].seed == others[0].seed


def test_refills_walk_over_an_order_of_their_own_past_what_the_round_has():
    rounds, refills = rollouts("rl.refills=2", "rl.rounds=5", "rl.rollout.prompts=10")
    assert [node.config.start for node in refills] == list(range(0, 100, 10))
    seed, total = rounds[0].config.order_seed, 100
    passed = [prompts_of_refill(10, total, n.config.start, seed, set()) for n in refills]
    assert sorted(sum(passed, [])) == list(range(total)) != sum(passed, [])
    # Not that of the rounds, whose next prompts are those of the next round.
    assert passed[0] != prompts_of_round(10, total, 0, seed)
    used = set(passed[0][:4])
    assert prompts_of_refill(10, total, 0, seed, used) == passed[0][4:] + passed[1][:4]
    assert prompts_of_refill(3, total, 0, seed, used) == passed[0][4:7]


def test_a_refill_takes_what_is_left_and_no_prompt_twice():
    used = set(range(3, 100))
    found = prompts_of_refill(10, 100, 990, 5, used)
    assert sorted(found) == [0, 1, 2]
    assert prompts_of_refill(10, 100, 0, 5, set(range(100))) == prompts_of_refill(0, 100, 0, 5, used) == []


def test_a_position_needs_none_before_it():
    endless, later = positions(6, 0, 11), positions(6, 15, 11)
    assert [next(endless) for _ in range(25)][15:] == [next(later) for _ in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize("total", [5, 1000, 65_535, 65_536, 65_538, 262_144, 262_146])
@pytest.mark.parametrize(("seed", "lap"), [(7, 0), (2**31 - 1, 1)])
def test_a_pass_is_the_order_that_grain_draws(total, seed, lap):
    order = grain.MapDataset.range(total).shuffle(seed=(seed + lap) % 2**31)
    # Over the end of the pieces in which places are drawn, and to that of the pass.
    for start, stop in ((0, min(total, 5_000)), (max(0, total - 300), total)):
        drawn = itertools.islice(positions(total, lap * total + start, seed), stop - start)
        assert list(drawn) == [order[place] for place in range(start, stop)]


@pytest.mark.slow
@pytest.mark.parametrize("total", [65_537, 262_145])
def test_each_prompt_is_once_in_a_pass_where_grain_repeats_one(total):
    assert sorted(prompts_of_round(total, total, 1, 7)) == list(range(total))
    # Of what is left the last.
    assert prompts_of_refill(1, total, 0, 7, set(range(total - 1))) == [total - 1]

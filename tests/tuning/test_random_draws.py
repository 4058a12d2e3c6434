"""Draws of rows by group: random, and no group on two sides but the last of an exact count."""

from collections import Counter

import pytest

from rlhf.tuning.random_draws import some_by_group, uniform, whole_groups

# A hundred groups, in the order of their names, of one to five rows.
GROUPS = [f"g{i:03d}" for i in range(100) for _ in range(1 + i % 5)]


def test_uniform_is_uniform():
    values = [uniform(0, "heldout", str(i)) for i in range(4000)]
    assert sum(values) / 4000 == pytest.approx(0.5, abs=0.02) and min(values) >= 0 and max(values) < 1
    assert uniform(0, "sft", "1") != uniform(0, "heldout", "1")


@pytest.mark.parametrize("seed", range(3))
def test_held_out_groups_are_whole_random_and_as_many_as_fit(seed):
    held = whole_groups(GROUPS, 60, seed, "heldout")
    assert held == sorted(set(held)) and 56 <= len(held) <= 60
    counts, all_counts = Counter(GROUPS[i] for i in held), Counter(GROUPS)
    assert all(count == all_counts[group] for group, count in counts.items())
    # Not a slice: a slice of a fifth would be of the first twenty groups.
    numbers = [int(group[1:]) for group in counts]
    assert 35 < sum(numbers) / len(numbers) < 65 and max(numbers) > 80 and min(numbers) < 20
    assert held != whole_groups(GROUPS, 60, seed + 1, "heldout")


def test_a_share_below_the_smallest_group_is_that_group():
    assert whole_groups(["a", "a", "b", "b", "b"], 1, 0, "x") == [0, 1]
    assert whole_groups(["a"] * 3, 1, 0, "x") == [0, 1, 2]
    assert whole_groups(GROUPS, 0, 0, "x") == whole_groups([], 3, 0, "x") == []


def test_some_rows_are_whole_random_groups_and_more_rows_contain_them():
    some, more = (some_by_group(GROUPS, count, 0, "evaluate") for count in (50, 80))
    assert (len(some), len(more)) == (50, 80) and set(some) < set(more)
    counts, all_counts = Counter(GROUPS[i] for i in some), Counter(GROUPS)
    assert sum(count != all_counts[group] for group, count in counts.items()) <= 1
    assert max(some) > 200 and min(some) < 60
    assert some_by_group(GROUPS, 1000, 0, "evaluate") == list(range(len(GROUPS)))

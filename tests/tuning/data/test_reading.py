"""Prepared examples as training takes them: each once an epoch, in the order of Grain, and a step by its number."""

import grain.python as grain
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf.tuning.data.reading import Steps
from rlhf.tuning.data.shuffle import shuffled
from tests.tuning.data.run import examples_of, shards

IDS = st.lists(st.integers(0, 50_000), min_size=1, max_size=8)
WIDE = {"max_examples": 40, "deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(**WIDE)
@given(st.lists(st.tuples(IDS, IDS, st.booleans()), max_size=20))
def test_examples_are_what_was_written(tmp_path, drawn):
    masks = [[i % 2 for i in range(len(c))] if masked else None for _, c, masked in drawn]
    paths = shards(
        tmp_path,
        [
            {"prompt_ids": p, "completion_ids": c, "completion_mask": m}
            for (p, c, _), m in zip(drawn, masks, strict=True)
        ],
    )
    found = examples_of(paths)
    assert isinstance(found.tokens, np.memmap) and len(found) == len(drawn)
    for i, (group, (prompt, completion, _), mask) in enumerate(zip(found, drawn, masks, strict=True)):
        assert (group.prompt, group.completions, list(group.ids)) == (prompt, [completion], [i])
        trained = [1] * len(completion) if mask is None else mask
        assert group.trained == sum(trained)
        assert group.masks == (None if all(m is None for m in masks) else [trained])
    assert found.sizes_N.tolist() == [len(p) + len(c) for p, c, _ in drawn]
    assert found.longest == max((len(c) for _, c, _ in drawn), default=0)


@settings(**WIDE)
@given(st.lists(st.tuples(IDS, IDS, IDS), min_size=2, max_size=20))
def test_pairs_stand_together_and_can_be_taken_apart(tmp_path, drawn):
    rows = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in drawn]
    found = examples_of(shards(tmp_path, rows, "preference"), ("chosen", "rejected"))
    assert [(g.prompt, g.completions, list(g.ids)) for g in found] == [
        (p, [c, r], [2 * i, 2 * i + 1]) for i, (p, c, r) in enumerate(drawn)
    ]
    alone = [(g.prompt, *g.completions, *g.ids) for g in found.apart()]
    assert alone[::2] == [(p, c, 2 * i) for i, (p, c, _) in enumerate(drawn)]
    assert alone[1::2] == [(p, r, 2 * i + 1) for i, (p, _, r) in enumerate(drawn)]
    assert found.sizes_N.tolist() == [g.size for g in found]
    part = found[1:]
    assert [list(g.ids) for g in part] == [[2 * i, 2 * i + 1] for i in range(len(drawn) - 1)]
    assert [g.completions for g in part] == [[c, r] for _, c, r in drawn[1:]]
    turned = found.with_completions_of([*range(1, len(drawn)), 0])
    assert [(g.prompt, g.completions[0]) for g in turned] == [
        (p, drawn[(i + 1) % len(drawn)][1]) for i, (p, _, _) in enumerate(drawn)
    ]


@pytest.mark.parametrize("size", [{"examples": 7}, {"tokens": 90}])
def test_every_example_comes_once_an_epoch_in_an_order_of_its_own(size):
    sizes = np.random.default_rng(0).integers(1, 40, 50)

    def epochs(seed):
        steps = Steps(sizes, 2, seed, **size)
        order = [n for step in steps for n in step]
        # No step has examples of two epochs.
        bounds = np.cumsum([len(step) for step in steps])
        assert 50 in bounds and bounds[-1] == 100
        return order[:50], order[50:]

    first, second = epochs(0)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first not in (second, sorted(first), epochs(1)[0]) and epochs(0) == (first, second)


@pytest.mark.slow
@settings(**WIDE)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 100))
def test_a_step_takes_the_examples_that_fit_its_tokens(sizes, most):
    sizes = np.asarray(sizes)
    steps = Steps(sizes, 1, 3, tokens=most)
    for here, after in zip(steps, [*steps[1:], None], strict=True):
        assert 0 < sizes[here].sum() <= most
        assert after is None or sizes[here].sum() + sizes[after[0]] > most


@pytest.mark.parametrize("size", [{"examples": 7}, {"tokens": 90}])
def test_a_step_is_known_by_its_number(size):
    """A resumed run, on however many hosts, asks for the steps that are left and gets the same ones."""
    sizes = np.random.default_rng(0).integers(1, 40, 50)
    steps = Steps(sizes, 3, 5, **size)
    whole = list(steps)
    assert len(whole) == len(steps)
    again = Steps(sizes, 3, 5, **size)
    assert [again[i] for i in reversed(range(len(again)))] == whole[::-1] and again[4:] == whole[4:]
    with pytest.raises(IndexError):
        again[len(whole)]


def test_an_example_larger_than_a_step_is_refused():
    with pytest.raises(ValueError, match="example 2 has 91 tokens, more than a step's 90: raise tokens_per_step"):
        Steps(np.asarray([3, 90, 91]), 1, 0, tokens=90)


@pytest.mark.parametrize("count", [1, 2, 257, 65_536, 65_538])
@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_the_order_is_grains(count, seed):
    order = grain.MapDataset.range(count).shuffle(seed=seed)
    positions = np.random.default_rng(0).permutation(count)[:500]
    assert shuffled(positions, count, seed).tolist() == [order[int(position)] for position in positions]


def test_each_number_comes_once_where_grain_repeats_one():
    assert sorted(shuffled(np.arange(65_537), 65_537, 3).tolist()) == list(range(65_537))

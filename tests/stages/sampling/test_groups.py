"""Which groups a round takes, and what it says where there are too few."""

import dataclasses

import numpy as np
import pytest

from rlhf.stages.sampling.groups import Scored, TooFewGroups, chosen_groups, missing_prompts
from rlhf.tuning.algorithms.diagnostics import pass_histogram
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.selection import Selection
from rlhf.tuning.algorithms.settings import RoundSettings
from rlhf.tuning.rows import CompletionRow, ScoreRow


def scored(totals, prompts):
    """Two completions of each prompt, with these totals; the round itself wants `prompts` groups."""
    names = [{"place": i, "sample": sample, "prompt_id": f"p{i % 3}"} for i in range(len(totals)) for sample in (0, 1)]
    rollouts = [CompletionRow(**name, prompt_ids=[1], token_ids=[2], logprobs=[-1.0]) for name in names]
    every = [total for pair in totals for total in pair]
    scores = [ScoreRow(**name, total=t) for name, t in zip(names, every, strict=True)]
    return Scored([[row] for row in rollouts], scores, prompts)


def test_too_few_informative_groups_end_the_round_with_a_histogram():
    given = scored([(0, 0), (1, 1), (0, 1), (1, None)], prompts=2)
    with pytest.raises(TooFewGroups) as error:
        chosen_groups(given, "stop")
    assert "1 of the 2 groups" in str(error.value)
    assert "after 4 prompts" in str(error.value)
    assert "0 to 1: [1, 0, 1, 0, 2]" in str(error.value)
    taken, metrics = chosen_groups(given, "train")
    assert {row.place for row in taken.rollouts} == {2}
    assert metrics == {"prompts_sampled": 4, "prompts_without_signal": 3, "prompts_to_spare": 0}


@pytest.mark.parametrize(
    ("totals", "histogram"),
    [
        ([(1, 1)] * 32, [0, 0, 0, 0, 32]),
        ([(0, 0)] * 32, [32, 0, 0, 0, 0]),
        ([(1, 1)] * 31 + [(1, 0)], [0, 0, 1, 0, 31]),
        ([(0, 0)] * 31 + [(1, 0)], [31, 0, 1, 0, 0]),
        # One penalty and one bonus leave right and wrong where they are.
        ([(1, 0)] * 30 + [(-9, 1), (0, 9)], [0, 0, 32, 0, 0]),
        ([(-2, -2)] * 3, [3, 0, 0, 0, 0]),
    ],
)
def test_prompts_are_counted_by_right_completions(totals, histogram):
    groups = np.repeat(np.arange(len(totals)), 2)
    assert pass_histogram(np.ravel(np.array(totals, np.float32)), groups, np.ones(len(groups), bool)) == histogram


def test_the_first_informative_groups_are_taken_and_the_rest_are_counted():
    taken, metrics = chosen_groups(scored([(0, 1), (1, 1), (1, 0), (0, 1)], prompts=2), "stop")
    assert [row.place for row in taken.rollouts] == [0, 0, 2, 2]
    assert [row.place for row in taken.scores] == [0, 0, 2, 2]
    assert metrics == {"prompts_sampled": 4, "prompts_without_signal": 1, "prompts_to_spare": 1}


def test_completions_that_the_update_masks_give_a_group_no_signal():
    """Places 0 and 1 differ by completions that were cut off: with `truncated: mask` refills replace them."""
    every = scored([(1, 0), (1, 0), (1, 0), (0, 1)], prompts=2)
    cut = [dataclasses.replace(row, stop="length" if row.place < 2 and row.sample else "eos") for row in every.rollouts]
    every = dataclasses.replace(every, trajectories=[[row] for row in cut])
    assert missing_prompts(every.only([0, 1]).totals("keep"), 2) == 0
    assert missing_prompts(every.only([0, 1]).totals("mask"), 2) == 2
    taken, metrics = chosen_groups(every, "stop", "mask")
    assert [row.place for row in taken.rollouts] == [2, 2, 3, 3]
    assert metrics == {"prompts_sampled": 4, "prompts_without_signal": 2, "prompts_to_spare": 0}
    settings = RoundSettings.of("dapo", truncated="mask")
    data = RoundData.from_rows(taken.rollouts, taken.scores)
    assert Selection.of(data, settings).trained().all()
    assert {row.place for row in chosen_groups(every, "stop")[0].rollouts} == {0, 1}


def test_a_group_that_has_nothing_to_train_on_gives_no_signal():
    """With `truncated: mask-loss` a reward cut off counts beside one that is whole, and not in a group all cut off."""
    every = scored([(1, 0), (0, 1), (1, 0), (0, 1), (1, None)], prompts=2)
    # Place 0 is cut off, of 1 and 2 one sample; place 3 is whole; what is whole at place 4 has no reward.
    cut = {(0, 0), (0, 1), (1, 1), (2, 0), (4, 0)}
    rows = [dataclasses.replace(r, stop="length" if (r.place, r.sample) in cut else "eos") for r in every.rollouts]
    every = dataclasses.replace(every, trajectories=[[row] for row in rows])
    assert missing_prompts(every.only([0, 4]).totals("mask-loss"), 2) == 2
    taken, metrics = chosen_groups(every, "stop", "mask-loss")
    assert [row.place for row in taken.rollouts] == [1, 1, 2, 2]
    assert metrics == {"prompts_sampled": 5, "prompts_without_signal": 2, "prompts_to_spare": 1}
    settings = RoundSettings.of("dapo", truncated="mask-loss")
    data = RoundData.from_rows(taken.rollouts, taken.scores)
    trained = Selection.of(data, settings).trained()
    assert trained.tolist() == [True, False, False, True]

"""Which groups a round takes, and what it says where there are too few."""

import pytest

from stages.sampling.groups import Scored, TooFewGroups, chosen_groups
from tuning.rows import CompletionRow, ScoreRow


def scored(totals, prompts):
    """Two completions of each prompt, with these totals; the round itself wants `prompts` groups."""
    names = [{"place": i, "sample": sample, "prompt_id": f"p{i % 3}"} for i in range(len(totals)) for sample in (0, 1)]
    rollouts = [CompletionRow(**name, prompt_ids=[1], token_ids=[2], logprobs=[-1.0]) for name in names]
    every = [total for pair in totals for total in pair]
    scores = [ScoreRow(**name, total=t) for name, t in zip(names, every, strict=True)]
    return Scored(rollouts, scores, prompts)


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


def test_the_first_informative_groups_are_taken_and_the_rest_are_counted():
    taken, metrics = chosen_groups(scored([(0, 1), (1, 1), (1, 0), (0, 1)], prompts=2), "stop")
    assert [row.place for row in taken.rollouts] == [0, 0, 2, 2]
    assert [row.place for row in taken.scores] == [0, 0, 2, 2]
    assert metrics == {"prompts_sampled": 4, "prompts_without_signal": 1, "prompts_to_spare": 1}

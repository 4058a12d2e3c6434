"""Every completion of a round has one fate with a reason, and the numbers add up."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from rlhf.stages.sampling.groups import Scored, chosen_groups
from rlhf.stages.update.outcomes import NO_BASELINE, fates_of
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.rounds import RoundResult
from rlhf.tuning.algorithms.selection import Selection
from rlhf.tuning.algorithms.settings import RoundSettings
from rlhf.tuning.rows import CompletionRow, FateRow, ScoreRow, names_of, read_table, write_table

TOTALS = [(0, 1), (1, 1), (1, None), (1, 0), (0, 1)]
"""Rewards of two completions of each place; the last of the fourth is cut off."""


def scored(prompts):
    names = [{"place": p, "sample": s, "prompt_id": f"p{p}"} for p in range(len(TOTALS)) for s in (0, 1)]
    rollouts = [
        CompletionRow(
            **name, prompt_ids=[1], token_ids=[2, 3], logprobs=[-1.0] * 2,
            stop="length" if (name["place"], name["sample"]) == (3, 1) else "eos",
        )
        for name in names
    ]  # fmt: skip
    totals = [total for pair in TOTALS for total in pair]
    scores = [
        ScoreRow(**name, total=total, failure=None if total is not None else "exact: boom")
        for name, total in zip(names, totals, strict=True)
    ]
    return Scored([[row] for row in rollouts], scores, prompts)


def result(taken, settings, greedy_N=None):
    """What a round on these would return of its completions."""
    data = dataclasses.replace(RoundData.from_rows(taken.rollouts, taken.scores), greedy_N=greedy_N)
    chosen = Selection.of(data, settings)
    trained_N, signal_N = chosen.trained(), chosen.signal_N
    advantages_N = np.where(np.arange(len(trained_N)) == 8, np.nan, np.arange(len(trained_N)))
    filtered_N = chosen.filtered_N
    return RoundResult(None, None, None, {}, trained_N, signal_N, advantages_N, filtered_N)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"truncated": "keep", "tied_groups": "drop"}, "trained trained tied tied tied failed trained trained"),
        ({"truncated": "mask", "tied_groups": "drop"}, "trained trained tied tied tied failed tied truncated"),
        ({"truncated": "keep", "kl_coef": 0.0}, "trained trained trained trained trained failed trained trained"),
    ],
)
def test_a_completion_has_one_fate_and_those_that_were_not_trained_a_reason(settings, expected, tmp_path):
    every, how = scored(prompts=5), RoundSettings.of("grpo", **settings)
    rows = fates_of(every, every, result(every, how), how.truncated)
    write_table(tmp_path / "a.parquet", rows, FateRow.schema())
    assert read_table([tmp_path / "a.parquet"], FateRow) == rows
    assert names_of(rows) == names_of(every.rollouts)
    assert [row.fate for row in rows] == [*expected.split(), "trained", "trained"]
    assert all(row.reason for row in rows if row.fate != "trained") and rows[5].reason == "exact: boom"
    # One number a completion, of those in the loss alone; the tokens of the last but one differ.
    assert (rows[1].advantage, rows[5].advantage, rows[8].advantage) == (1.0, None, None)


def test_groups_of_little_variety_are_called_filtered():
    every, how = scored(prompts=5), RoundSettings.of("grpo", kl_coef=0.1, keep_most_varied=0.4)
    rows = fates_of(every, every, result(every, how), "keep")
    # Places 0, 3 and 4 vary alike: the first two of them stay.
    assert [row.fate for row in rows] == ["trained"] * 2 + ["filtered"] * 3 + ["failed"] + ["trained"] * 2 + [
        "filtered"
    ] * 2
    assert all("keep_most_varied" in row.reason for row in rows if row.fate == "filtered")


def test_a_failed_episode_has_failed_whatever_its_reward():
    every = scored(prompts=5)
    trajectories = [
        [dataclasses.replace(r, stop="failed") if (r.place, r.sample) == (0, 1) else r] for r in every.rollouts
    ]
    every, how = dataclasses.replace(every, trajectories=trajectories), RoundSettings.of("grpo", tied_groups="drop")
    rows = fates_of(every, every, result(every, how), "keep")
    assert (rows[0].fate, rows[1].fate, rows[1].reason) == ("tied", "failed", "its episode failed")
    taken, _ = chosen_groups(every, "train")
    assert {row.place for row in taken.rollouts} == {3, 4}


def test_groups_that_a_round_with_refills_does_not_take_are_spare_or_failed():
    every = scored(prompts=2)
    taken, about = chosen_groups(every, "stop")
    rows = fates_of(every, taken, result(taken, RoundSettings.of("grpo", kl_coef=0.0)), "keep")
    assert Counter(row.fate for row in rows) == {"trained": 4, "failed": 1, "spare": 5}
    assert about == {"prompts_sampled": 5, "prompts_without_signal": 2, "prompts_to_spare": 1}


def test_a_completion_without_a_baseline_is_not_called_tied():
    every, how = scored(prompts=5), RoundSettings.of("remax", kl_in_reward=0.0)
    greedy_N = np.repeat([0.0, np.nan, 1.0, 0.0, 0.0], 2)
    rows = fates_of(every, every, result(every, how, greedy_N), "keep", greedy_N)
    assert [row.fate for row in rows] == ["trained"] * 2 + ["unchosen"] * 2 + ["trained", "failed"] + ["trained"] * 4
    assert {row.reason for row in rows if row.place == 1} == {NO_BASELINE}
    assert rows[5].reason == "exact: boom"

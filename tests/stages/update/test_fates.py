"""Every completion of a round has one fate with a reason, and the numbers add up."""

from collections import Counter

import numpy as np
import pytest

from stages.sampling.groups import Scored, chosen_groups
from stages.update.fates import counts, fates_of
from tuning.algorithms import selection
from tuning.algorithms.algorithm import find
from tuning.algorithms.round_data import RoundData
from tuning.algorithms.settings import RoundSettings
from tuning.rows import CompletionRow, FateRow, ScoreRow, names_of, read_table, write_table

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
    return Scored(rollouts, scores, prompts)


def fates(taken, settings, advantages_NT=None):
    data = RoundData.from_rows(taken.rollouts, taken.scores)
    algorithm = find(settings.objective)
    found = selection.scored(data, settings)
    keep_N = selection.trained(data, found, algorithm, settings)
    return selection.fates(data, found, algorithm, settings, keep_N, advantages_NT)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"truncated": "keep", "kl_coef": 0.0},
            ["trained"] * 2 + ["tied"] * 2 + ["tied", "failed"] + ["trained"] * 4,
        ),
        (
            {"truncated": "mask", "kl_coef": 0.0},
            ["trained"] * 2 + ["tied"] * 2 + ["tied", "failed", "tied", "truncated"] + ["trained"] * 2,
        ),
        (
            {"truncated": "keep", "kl_coef": 0.1, "tied_groups": "regularise"},
            ["trained"] * 2 + ["regularised"] * 3 + ["failed"] + ["trained"] * 4,
        ),
    ],
)
def test_a_completion_has_one_fate_and_those_that_were_not_trained_a_reason(settings, expected, tmp_path):
    every = scored(prompts=5)
    advantages_NT = np.repeat(np.arange(10.0)[:, None], 8, axis=1)
    advantages_NT[8, 1] = -1
    rows = fates_of(every, every, fates(every, RoundSettings.of("grpo", **settings), advantages_NT))
    write_table(tmp_path / "a.parquet", rows, FateRow.schema())
    assert read_table([tmp_path / "a.parquet"], FateRow) == rows
    assert names_of(rows) == names_of(every.rollouts)
    assert [row.fate for row in rows] == expected
    assert all((row.reason is None) == (row.fate == "trained") for row in rows)
    assert rows[5].reason == "exact: boom"
    # One number a completion, of those in the loss alone; the tokens of the last but one differ.
    assert (rows[1].advantage, rows[5].advantage, rows[8].advantage) == (1.0, None, None)
    assert counts(rows) == Counter(expected) and sum(counts(rows).values()) == len(every.rollouts)


def test_groups_that_a_round_with_refills_does_not_take_are_spare_tied_or_failed():
    every = scored(prompts=2)
    taken, about = chosen_groups(every, "stop")
    rows = fates_of(every, taken, fates(taken, RoundSettings.of("grpo", kl_coef=0.0)))
    assert [row.fate for row in rows] == ["trained"] * 2 + ["tied"] * 3 + ["failed"] + ["trained"] * 2 + ["spare"] * 2
    assert about == {"prompts_sampled": 5, "prompts_without_signal": 2, "prompts_to_spare": 1}

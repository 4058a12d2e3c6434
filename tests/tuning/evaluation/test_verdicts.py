"""Verdicts of two policies are joined by problem, and their difference is resampled by group."""

import dataclasses

import numpy as np
import pytest

from rlhf.tuning.evaluation.verdicts import difference, judged
from rlhf.tuning.rows import VerdictRow


def verdicts(correct_PS):
    return [
        VerdictRow(
            place=p, prompt_id="same", sample=s, group=f"g{p}", judge="j", answer=None, score=float(v), failure=None
        )
        for p, row in enumerate(correct_PS) for s, v in enumerate(row)
    ]  # fmt: skip


def test_a_small_gain_on_every_problem_is_seen_where_intervals_overlap():
    rng = np.random.default_rng(0)
    easy = rng.random((60, 4)) < rng.beta(0.5, 0.5, (60, 1))
    better = easy | (rng.random((60, 4)) < 0.15)
    before, after = judged(verdicts(easy), 4), judged(verdicts(better), 4)
    assert after.score()["score_low"] < before.score()["score_high"]
    found = difference(before, after)
    assert found.verdict == "better" and found.mean == pytest.approx(better.mean() - easy.mean())
    assert difference(after, before).verdict == "worse" and difference(before, before).verdict == "even"
    assert found.problems == 60


def test_order_of_the_tables_and_further_problems_change_nothing():
    before, after = verdicts(np.eye(6)[:, :2]), verdicts(1 - np.eye(6)[:, :2])
    expected = difference(judged(before, 2), judged(after, 2))
    assert difference(judged(before[::-1], 2), judged(after[2:] + after[:2], 2)) == expected
    fewer = difference(judged(before[:8], 2), judged(after, 2))
    assert fewer.problems == 4


def test_problems_of_another_evaluation_are_refused():
    other = [dataclasses.replace(v, group="other") for v in verdicts(np.eye(4))]
    with pytest.raises(ValueError, match="different problems"):
        difference(judged(verdicts(np.eye(4)), 4), judged(other, 4))

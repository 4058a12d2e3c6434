"""Pairs of an answer and a completion, with the verdict of a careful human marker: `verdicts.jsonl`.

They are facts from public test sets and reports (`source`) and from audits of this project. `differs` says why the
verdict is not the published one.
"""

import itertools
import json
from pathlib import Path

import pytest

from rlhf.tuning.rewards.answers import unreadable
from rlhf.tuning.rewards.functions import BUILT_IN

ROWS = [json.loads(line) for line in Path(__file__).with_name("verdicts.jsonl").read_text().splitlines()]
KINDS = {key: list(rows) for key, rows in itertools.groupby(ROWS, key=lambda row: (row["reward"], row["kind"]))}


def judged(reward, answer, completion):
    metadata = {"opened_tag": answer} if reward == "tagged" else {}
    if isinstance(answer, list):
        answer, metadata = json.dumps(answer), {"answers": answer}
    # What is judged is also accepted when data is prepared.
    assert unreadable(reward, answer, metadata) is None
    return BUILT_IN[reward](["?"], [completion], answer=[answer], metadata=[metadata])[0]


@pytest.mark.parametrize("key", KINDS, ids=": ".join)
def test_a_verifier_judges_as_a_careful_human_marker(key):
    rows = [(row["answer"], row["completion"], row["verdict"]) for row in KINDS[key]]
    assert [row for row in rows if judged(key[0], *row[:2]) != row[2]] == []


def test_the_table_is_large_and_has_both_verdicts_of_each_reward():
    verdicts = {reward: {row["verdict"] for row in ROWS if row["reward"] == reward} for reward, _ in KINDS}
    assert len(ROWS) >= 300 and all(both == {0, 1} for both in verdicts.values())


@pytest.mark.parametrize("name", ["number_match", "math_equal", "exact_match"])
def test_a_thought_that_the_template_opened_and_nothing_closed_has_no_answer(name):
    texts = ["7", "\\boxed{7}, or is it", "hm</think>7"]
    found = BUILT_IN[name](["?"] * 3, texts, answer=["7"] * 3, metadata=[{"opened_tag": "think"}] * 3)
    assert found == [0, 0, 1]

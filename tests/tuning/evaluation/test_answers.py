"""Votes of maj@n: what the judge reads is the vote, equals are one vote, and no pattern holds the worker."""

from __future__ import annotations

import pytest

from tuning.evaluation import answers
from tuning.evaluation.answers import answer_of
from tuning.rewards.functions import number_match


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{\frac{\sqrt{3}}{2}}.", r"\frac{\sqrt{3}}{2}"),
        (r"\boxed{1}, no: \boxed{ \sqrt{\frac{1}{\sqrt{2}}} }", r"\sqrt{\frac{1}{\sqrt{2}}}"),
        (r"\boxed{1} then \boxed{2 {", "1"),
        (r"\boxed{}", None),
    ],
)
def test_a_box_with_braces_of_any_depth_is_a_vote(text, answer):
    assert answer_of("math_equal", {}, text) == answer


@pytest.mark.parametrize("text", ["(3,4)", "1,200", "12-5", "it is .5", "1,2,3"])
def test_the_vote_is_the_number_that_the_judge_reads(text):
    vote = answer_of("number_match", {}, text)
    assert number_match(["p"], [text], answer=[vote]) == [1.0]
    assert vote == {"(3,4)": "4.0", "1,200": "1200.0", "12-5": "5.0", "it is .5": "0.5", "1,2,3": "3.0"}[text]


def test_a_pattern_that_never_ends_finds_no_answer(monkeypatch):
    monkeypatch.setattr(answers, "SECONDS", 0.1)
    assert answer_of("exact_match", {"extract": "(a|aa)+$"}, "a" * 60 + "c") is None
    assert answer_of("exact_match", {"extract": "b((?:a|aa)+)$"}, "baa") == "aa"

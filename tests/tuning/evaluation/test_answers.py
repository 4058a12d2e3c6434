"""Votes of maj@n: what the judge reads is the vote, equals are one vote, and no pattern holds the worker."""

import time

import pytest

from rlhf.tuning.evaluation import answers
from rlhf.tuning.evaluation.answers import answer_of, answers_of, equal_expressions
from rlhf.tuning.evaluation.statistics import majority
from rlhf.tuning.rewards.functions import number_match
from rlhf.tuning.rewards.samples import Outcome, Sample


@pytest.mark.parametrize(
    ("judge", "arguments", "texts", "answer"),
    [
        ("exact_match", {}, ["7", " 7\n"], "7"),
        ("exact_match", {"extract": "A: (.)"}, ["so A: 7", "A: 1, no, A: 7"], "7"),
        ("exact_match", {"extract": "A: (.)"}, ["seven", ""], None),
        ("number_match", {}, ["it is 7", "7.0", "1 + 6 = 7.00"], "7.0"),
        ("number_match", {}, ["seven"], None),
        ("math_equal", {}, [r"hence \boxed{\frac{1}{2}}", r"\boxed{ \frac{1}{2} }."], r"\frac{1}{2}"),
        ("math_equal", {}, [r"So \boxed{\frac{\sqrt{3}}{2}}."], r"\frac{\sqrt{3}}{2}"),
        ("math_equal", {}, [r"\boxed{1}, no: \boxed{ \sqrt{\frac{1}{\sqrt{2}}} }"], r"\sqrt{\frac{1}{\sqrt{2}}}"),
        ("math_equal", {}, [r"\boxed{1} then \boxed{2 {"], "1"),
        ("math_equal", {}, [r"\boxed{}"], None),
        ("mine:judge", {}, ["some text "], "some text"),
    ],
)
def test_equal_answers_are_one_vote(judge, arguments, texts, answer):
    assert {answer_of(judge, arguments, text) for text in texts} == {answer}


@pytest.mark.parametrize("text", ["(3,4)", "1,200", "12-5", "it is .5", "1,2,3"])
def test_the_vote_is_the_number_that_the_judge_reads(text):
    vote = answer_of("number_match", {}, text)
    assert number_match(["p"], [text], answer=[vote]) == [1.0]
    assert vote == {"(3,4)": "4.0", "1,200": "1200.0", "12-5": "5.0", "it is .5": "0.5", "1,2,3": "3.0"}[text]


def test_equal_expressions_have_the_number_of_the_first():
    texts = [r"\boxed{x = 3}", r"\boxed{1/2}", "nothing", r"so \boxed{0.5}", r"\boxed{3}", r"\boxed{\frac{1}{2}}"]
    assert equal_expressions([""] * 6, texts) == [0, 1, None, 1, 0, 1]


@pytest.mark.slow
def test_forms_that_the_verifier_takes_for_equal_are_one_vote_of_their_problem():
    texts = [
        [r"\boxed{\frac{1}{2}}", r"so \boxed{0.5}", r"\boxed{1/2}", r"\boxed{2}", "nothing"],
        [r"\boxed{0.5}", r"\boxed{x = 3}", r"\boxed{3}", r"\boxed{\{1, 2\}}", r"\boxed{\{2, 1\}}"],
    ]
    samples = [Sample(prompt="", completion=text) for problem in texts for text in problem]
    votes = answers_of("math_equal", {}, samples, [0] * 5 + [1] * 5, seconds=10.0, workers=1)
    assert votes[:5] == [r"\frac{1}{2}"] * 3 + ["2", None]
    assert votes[5:] == ["0.5", "x=3", "x=3", r"\{1,2\}", r"\{1,2\}"]
    # The vote is right where the judge says so.
    assert majority([[1, 1, 1, 0, 0]], [votes[:5]]) == 1.0
    # Of a judge that compares by text or number nothing changes.
    assert answers_of("number_match", {}, samples[:3], [0] * 3, seconds=1.0) == ["2.0", "0.5", "2.0"]


def test_a_comparison_that_fails_leaves_the_forms_of_its_problem_apart():
    late = [Outcome(None, "timeout after 1 s")] * 2
    assert answers._votes(["1/2", "0.5"], late) == {"1/2": "1/2", "0.5": "0.5"}
    assert answers._votes(["1/2", "0.5", "?"], [Outcome(0.0), Outcome(0.0), Outcome(None)]) == {
        "1/2": "1/2", "0.5": "1/2", "?": None,
    }  # fmt: skip


def test_a_pattern_that_never_ends_finds_no_answer(monkeypatch):
    monkeypatch.setattr(answers, "SECONDS", 0.1)
    assert answer_of("exact_match", {"extract": "(a|aa)+$"}, "a" * 60 + "c") is None
    assert answer_of("exact_match", {"extract": "b((?:a|aa)+)$"}, "baa") == "aa"


def test_a_number_is_searched_for_in_bounded_time(monkeypatch):
    monkeypatch.setattr(answers, "SECONDS", 0.2)
    began = time.monotonic()
    assert answers.answer_of("number_match", {}, "12,34," * 20_000) is None
    assert answers.answer_of("number_match", {}, "####" + " " * 20_000) is None
    assert time.monotonic() - began < 10
    assert answers.answer_of("number_match", {}, "12,34,567") == "1234567.0"

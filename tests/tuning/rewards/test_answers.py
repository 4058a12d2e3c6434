"""An answer that a reward cannot read is known before anything is sampled; one that passes is rewarded."""

import pytest

from rlhf.tuning.rewards.answers import CHECKS, unreadable


@pytest.mark.parametrize(
    ("answer", "metadata"),
    [
        ('["assert f(2) == 4"]', {"answers": ["assert f(2) == 4"]}),
        ("assert f(2) == 4", {}),
        (None, {"tests": [{"input": "1", "output": "2"}, "f(3)"]}),
    ],
)
def test_tests_are_readable(answer, metadata):
    assert unreadable("code_passes", answer, metadata) is None


@pytest.mark.parametrize(
    ("name", "answer", "metadata", "reason"),
    [
        ("number_match", "√2", {}, "one number, got '√2'"),
        ("number_match", '["four"]', {"answers": ["four"]}, """one number, got '["four"]'"""),
        ("exact_match", " ", {}, "a text that is not empty, got ' '"),
        (
            "exact_match",
            '{"a": 1}',
            {"answers": {"a": 1}},
            "a text or number as answer, or a list of them, got {'a': 1}",
        ),
        ("code_passes", '["assert f(2) == 4"]', {}, "tests in Python that can fail, such as assert f(2) == 4, got "),
        ("code_passes", "4", {}, "tests in Python that can fail"),
        ("code_passes", "def near(a): assert a", {}, "tests in Python that can fail"),
        ("number_match", "nan", {}, "one number, got 'nan'"),
        (
            "number_match",
            "It is\n#### 72",
            {},
            "one number, got 'It is\\n#### 72'; `fields: {answer: {from: answer, pattern: '#### (.*)'}}` in data takes "
            "the text after ####",
        ),
        ("number_match", "Natalia sold 48/2 = 24 clips.", {}, "one number, got 'Natalia"),
        ("math_equal", "$", {}, "a mathematical expression, got '$'"),
        ("code_passes", "assert f(2) == ", {}, "tests in Python that can fail"),
        ("code_passes", None, {"tests": [{"input": "1"}]}, "tests as programs or as {input, output}"),
        ("code_passes", None, {"tests": "f(1)"}, "a list of tests in metadata.tests"),
    ],
)
def test_unreadable(name, answer, metadata, reason):
    assert str(unreadable(name, answer, metadata)).startswith(reason)


@pytest.mark.parametrize("name", CHECKS)
def test_without_an_answer_no_reward_applies_and_nothing_is_wrong(name):
    assert unreadable(name, None, {}) is None

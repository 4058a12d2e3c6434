"""An answer that a reward cannot read is known before anything is sampled; one that passes is rewarded."""

import pytest

from rlhf.tuning.rewards.answers import CHECKS, unreadable
from rlhf.tuning.rewards.functions import BUILT_IN


@pytest.mark.parametrize(
    ("name", "answer", "metadata"),
    [
        ("number_match", "18", {}),
        ("number_match", "-1,234.50", {}),
        ("number_match", "$18", {}),
        ("number_match", "1/2", {}),
        ("number_match", '["4", "four"]', {"answers": ["4", "four"]}),
        ("code_passes", '["assert f(2) == 4"]', {"answers": ["assert f(2) == 4"]}),
        ("math_equal", r"\frac{1}{2}", {}),
        ("math_equal", r"So it is $\boxed{x^2+1}$.", {}),
        ("code_passes", "assert f(2) == 4", {}),
        ("code_passes", None, {"tests": [{"input": "1", "output": "2"}, "f(3)"]}),
        ("exact_match", "anything", {}),
    ],
)
def test_readable(name, answer, metadata):
    assert unreadable(name, answer, metadata) is None
    if answer is not None and name != "code_passes" and not metadata:
        assert BUILT_IN[name](["p"], [answer], answer=[answer], metadata=[metadata]) == [1.0]


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

"""Fields from others: values inside a record, what a pattern matches, what a template makes; else a dead letter."""

import re

import pytest

from rlhf.tuning.data import fields
from rlhf.tuning.data.blocks import SourcePlan
from rlhf.tuning.data.fields import Mapper, boxed
from rlhf.tuning.data.layouts import LayoutError
from tests.tuning.data.run import letters, plan_of, rows, run

RECORD = {
    "question": "2+2?",
    "answer": "Adding.\n#### 5\nNo:\n#### 4 \n",
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
    "a.b": "dotted",
    "score": 3.5,
}


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("question", "2+2?"),
        ({"from": "messages.0.content"}, "hi"),
        ({"from": "messages.-1.role"}, "assistant"),
        ({"from": "a.b"}, "dotted"),
        ({"from": "score"}, 3.5),
        ({"from": "answer", "pattern": "#### (.*)"}, "4"),
        ({"from": "score", "pattern": r"[\d.]+"}, "3.5"),
        ({"template": "{{ question }} {{ messages[1].content }}"}, "2+2? hello"),
        ({"from": "answer", "pattern": "#### (.*)", "template": "<{{ value }}>"}, "<4>"),
    ],
)
def test_values_by_path_pattern_and_template(spec, value):
    assert Mapper(fields={"x": spec})(RECORD)["x"] == value


@pytest.mark.parametrize(
    ("text", "pattern", "value", "number"),
    [
        ("#### 1,028", r"#### (\d+)", "1", "1,028"),
        ("#### 3.5", r"#### (\d+)", "3", "3.5"),
        ("#### 72", r"#### (\d)", "7", "72"),
        ("#### -12", r"(\d+)\s*$", "12", "-12"),
        ("#### −12", r"(\d+)\s*$", "12", "−12"),
        ("#### 1/4", r"(\d+)\s*$", "4", "1/4"),
        ("12-5", r"(\d+)\s*$", "5", None),
        ("#### 1,028", r"\d+", "028", "1,028"),
        ("#### 1,028", r"#### ([\d,]+)", "1,028", None),
        ("#### 72, or so.", r"#### (\d+)", "72", None),
        ("(3, 4)", r"(\d+)", "4", None),
        ("1,028 #### seven", r"#### (.*)", "seven", None),
    ],
)
def test_a_pattern_takes_whole_numbers_alone(text, pattern, value, number):
    mapper = Mapper(fields={"answer": {"from": "answer", "pattern": pattern}})
    if number is None:
        assert mapper({"answer": text})["answer"] == value
        return
    with pytest.raises(LayoutError, match=re.escape(f"expected whole numbers from {pattern!r}")) as error:
        mapper({"answer": text})
    assert str(error.value).endswith(f"got {value!r} of {number!r}")


def test_a_field_that_was_read_leaves_unless_it_is_one_of_the_record():
    made = Mapper({"score": None}, {"prompt": "question", "x": {"from": "answer", "pattern": "5"}})(RECORD)
    assert made.keys() == {"prompt", "x", "answer", "messages", "a.b"}
    assert Mapper(fields={"prompt": {"template": "{{ question }}{{ messages[0].content }}"}})(RECORD).keys() == {
        "prompt", "answer", "a.b", "score"
    }  # fmt: skip


def test_templates_give_labels_and_margins_their_types():
    made = Mapper(fields={"margin": {"template": "{{ score - 1 }}"}, "label": {"template": "{{ score > 3 }}"}})(RECORD)
    assert (made["margin"], made["label"]) == (2.5, True)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"from": "solution"},
            "field `x`: expected a value at `solution`, got nothing at `solution` (there is question",
        ),
        ({"from": "messages.2.content"}, "got nothing at `messages.2` (there is list"),
        ({"from": "answer", "pattern": "Answer: (.*)"}, "a match of 'Answer: (.*)' in `answer`, got string 'Adding."),
        ({"from": "messages", "pattern": "a"}, "a match of 'a' in `messages`, got list"),
        ({"template": "{{ solution }}"}, "a record for the template '{{ solution }}', got 'solution' is undefined"),
        ({"template": "{{ question | boxed }}"}, "got no \\boxed{} in ... '2+2?'"),
        ({"template": "{{ question.__class__.__mro__ }}"}, "is unsafe"),
    ],
)
def test_what_cannot_be_had_names_field_pattern_and_place(spec, message):
    with pytest.raises(LayoutError, match=re.escape(message)):
        Mapper(fields={"x": spec})(RECORD)


@pytest.mark.parametrize("names", [("question", "prompt"), ("prompt", "question")])
def test_a_name_that_a_record_has_already_is_given_to_no_other_field(names):
    raw = {name: name for name in names}
    with pytest.raises(LayoutError, match=r"`prompt`: expected one field of this name \(rename: {prompt: null}"):
        Mapper({"question": "prompt"})(raw)
    assert Mapper({"question": "prompt", "prompt": None})(raw) == {"prompt": "question"}
    assert Mapper({"question": "prompt", "prompt": "question"})(raw) == {"prompt": "question", "question": "prompt"}
    assert Mapper({"question": "prompt"})(raw | {"prompt": None}) == {"prompt": "question"}


def test_a_pattern_that_never_ends_is_told_as_one_that_does_not_match(monkeypatch):
    monkeypatch.setattr(fields, "PATTERN_SECONDS", 0.1)
    with pytest.raises(LayoutError, match=re.escape("a match of '(a|aa)+$' in `answer` within 0.1 s, got ... 'aaa")):
        Mapper(fields={"x": {"from": "answer", "pattern": "(a|aa)+$"}})({"answer": "a" * 70 + "c"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": {"from": "a", "pattern": "("}}, "fields.x: '(' is not a regular expression (missing )"),
        ({"x": {"template": "{{ a"}}, "fields.x: '{{ a' is not a template (unexpected end"),
        ({"x": {"pattern": "a"}}, "fields.x: a pattern needs `from`"),
        ({"x": {}}, "fields.x: expected a path, or some of from, pattern, template"),
        ({"prompt": "a"}, "fields.prompt: rename gives 'prompt' too"),
    ],
)
def test_what_cannot_be_read_is_refused_before_any_record(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Mapper({"q": "prompt"}, fields)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"So $x = \boxed{\frac{\sqrt{3}}{2}}$.", r"\frac{\sqrt{3}}{2}"),
        (r"\boxed{1} and then \boxed{ 2 }", "2"),
        (r"$\fbox{7}$", "7"),
        (r"It is $\boxed 5$.", "5"),
    ],
)
def test_the_last_box_with_its_inner_braces(text, value):
    assert boxed(text) == value


def test_a_box_that_stays_open_is_refused():
    with pytest.raises(ValueError, match="without its closing brace"):
        boxed(r"\boxed{\frac{1}{2}")


def test_a_record_whose_answer_does_not_match_is_a_dead_letter(tmp_path):
    source = SourcePlan(fields={"prompt": "question", "answer": {"from": "answer", "pattern": "#### (.*)"}})
    plan = plan_of(tmp_path / "tokenizer", splits=("prompts",), sources=(source,), verifiers=("number_match",))
    published = [{"question": f"How many, {i}?", "answer": f"Because.\n#### {i},000"} for i in range(3)]
    bad = [{"question": "And?", "answer": "None."}, {"question": "Or?", "answer": "#### five"}]
    run(plan, tmp_path, *published, *bad)
    assert sorted(row["answer"] for row in rows(plan, "prompts", tmp_path)) == ["0,000", "1,000", "2,000"]
    one, two = letters(tmp_path)
    assert (one["step"], two["step"]) == ("validate", "answers")
    assert one["reason"] == (
        "data.jsonl, record 4, field `answer`: expected a match of '#### (.*)' in `answer`, got string 'None.'"
    )
    assert two["reason"] == "data.jsonl, record 5, field `answer`: number_match expects one number, got 'five'"

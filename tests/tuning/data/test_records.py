"""A record is read whole and known by its content; an error names the record and the field."""

import json
import pickle

import pytest

from rlhf.tuning.data.fields import Mapper
from rlhf.tuning.data.json_kinds import canonical_json, digest
from rlhf.tuning.data.records import RecordError, parse_line, parse_record


def parse(**raw):
    return parse_record(raw, "data.jsonl", 7)


def test_a_full_record():
    record = parse(
        id="r1", prompt="2 + 2 = ?", completion="4", rejected=["5", "3"], answer="4", margin=1, split="sft", group="g",
        metadata={"b": 1, "a": [2.5]},
    )  # fmt: skip
    assert (record.id, record.group, record.split) == ("r1", "g", "sft")
    assert record.prompt == ({"role": "user", "content": "2 + 2 = ?"},)
    assert record.prompt_text == "2 + 2 = ?"
    assert (record.completion, record.rejected, record.answer, record.margin) == ("4", ("5", "3"), "4", 1.0)
    assert record.metadata == '{"a":[2.5],"b":1}'


def test_content_is_the_identity_where_there_is_no_id():
    one, other = parse(prompt="a", metadata={"x": 1, "y": 2}), parse(metadata={"y": 2, "x": 1}, prompt="a", answer=None)
    assert one == other and one.id == one.content and len(one.id) == 64
    assert parse(prompt="a", id="name").content == parse(prompt="a").content
    assert len({parse(prompt="a").id, parse(prompt="b").id, parse(prompt="a", answer="1").id}) == 3


def test_equal_prompts_are_one_group_by_default():
    assert parse(prompt="a", completion="x").group == parse(prompt="a", completion="y").group
    assert parse(prompt="a").group == parse(prompt=[{"role": "user", "content": "a"}]).group
    assert parse(prompt="a").group != parse(prompt="b").group


def test_conversations_that_begin_alike_are_one_group_by_default():
    system, more = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sure?"}
    opening = parse(prompt="hello").group
    assert parse(prompt=[system, USER]).group == opening
    assert parse(messages=[USER, BOT, more, BOT]).group == parse(prompt=[system, USER, RUDE, more]).group == opening
    assert parse(prompt=[USER, more]).group != opening
    # Without a turn before the assistant's first one, all turns but the system's count.
    assert parse(prompt=[BOT, USER]).group != parse(prompt=[BOT, more]).group


USER = {"role": "user", "content": "hello"}
BOT = {"role": "assistant", "content": "hi"}
RUDE = {"role": "assistant", "content": "what"}


def test_text_of_a_conversation():
    record = parse(messages=[{"role": "system", "content": "Be kind."}, USER, BOT, USER])
    assert record.prompt_text == "system: Be kind.\nuser: hello\nassistant: hi\nuser: hello"


@pytest.mark.parametrize(
    "raw, field, expected",
    [
        ({}, "prompt", "a string or a list of messages"),
        ({"prompt": ""}, "prompt", "a non-empty string"),
        ({"prompt": 3}, "prompt", "a non-empty list of messages"),
        ({"prompt": [USER, BOT]}, "prompt", "to be a user's"),
        ({"prompt": [{"role": "bot", "content": "x"}]}, "prompt", "a role out of system, user"),
        ({"prompt": [{"role": "user", "content": "x", "name": "Al"}]}, "prompt", "exactly `role` and `content`"),
        ({"prompt": "a\ud800"}, "prompt", "text in UTF-8"),
        ({"prompt": "a", "metadata": {"x": "a\udcff"}}, "metadata", "valid Unicode"),
        ({"prompt": "a", "completion": "b", "answer": True}, "answer", "a non-empty string or a number"),
        ({"prompt": "a", "group": [1]}, "group", "a non-empty string or a number"),
        ({"prompt": "a", "answer": float("inf"), "completion": "b"}, "answer", "a non-empty string or a number"),
        ({"prompt": "a", "margin": "0.5"}, "margin", "a finite number, got string '0.5'"),
        ({"prompt": "a", "completion": "b", "label": "true"}, "label", "true or false, got string 'true'"),
        ({"prompt": "a", "completion": 5}, "completion", "a non-empty string, got number 5"),
        ({"prompt": "a", "answer": [4]}, "answer", "a non-empty string"),
        (
            {"instruction": "Add.", "output": "2", "text": "A document."},
            "text",
            "to leave it out, set rename: {text: null}",
        ),
        ({"prompt": "a", "rejected": "x"}, "completion", "the preferred answer"),
        ({"prompt": "a", "completion": "x", "rejected": "x"}, "rejected", "differ from the completion"),
        ({"prompt": "a", "completion": "x", "chosen": "x"}, "chosen", "either"),
        ({"prompt": "a", "margin": float("nan")}, "margin", "a finite number"),
        ({"prompt": "a", "margin": True}, "margin", "a finite number"),
        ({"prompt": "a", "split": "train"}, "split", "one of sft, preference, labelled, prompts, heldout"),
        ({"prompt": "a", "split": "sft"}, "completion", "since split is 'sft'"),
        ({"prompt": "a", "metadata": [1]}, "metadata", "an object"),
        ({"prompt": "a", "metadata": {"x": float("inf")}}, "metadata", "finite numbers"),
        ({"prompt": "a", "anwser": "4"}, "anwser", "did you mean `answer`?"),
        ({"prompt": "a", "score": 4}, "score", "extra_fields: metadata"),
        ({"chosen": [USER, BOT], "rejected": [BOT, USER, RUDE]}, "rejected", "the same turns"),
    ],
)
def test_errors_name_record_and_field(raw, field, expected):
    with pytest.raises(RecordError) as caught:
        parse_record({"id": "r9", **raw}, "data.jsonl", 7)
    message = str(caught.value)
    assert message.startswith("data.jsonl, record 7 (id 'r9'), field")
    assert caught.value.field.split(".")[0] == field and expected in message


@pytest.mark.parametrize("line", [b"{", b"\xff\xfe", b"[1]", b"null", b"[" * 100_000])
def test_lines_that_are_no_object(line):
    with pytest.raises(RecordError, match="data.jsonl, record 3"):
        parse_line(line, "data.jsonl", 3)


def test_lines_byte_order_mark_and_renamed_fields():
    line = b"\xef\xbb\xbf" + json.dumps({"question": "q", "answer": "a", "level": 2}).encode()
    record = parse_line(line, "d", 1, mapper=Mapper({"question": "prompt"}), extra="metadata")
    assert (record.prompt_text, record.answer, record.metadata) == ("q", "a", '{"level":2}')


def test_errors_and_records_travel_between_processes():
    error = pickle.loads(pickle.dumps(RecordError("s", 1, "f", "e", "g", "i")))
    assert error.number == 1 and "record 1 (id 'i')" in str(error)
    assert pickle.loads(pickle.dumps(parse(prompt="a"))) == parse(prompt="a")


def test_canonical_json():
    assert canonical_json({"b": "ü", "a": [1, 2.0]}) == '{"a":[1,2.0],"b":"ü"}'
    assert digest("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (-7, "-7"), (0.5, "0.5"), (10**30, "1" + "0" * 30)])
@pytest.mark.parametrize("more", [{}, {"completion": "b"}, {"completion": "b", "rejected": "c"}])
def test_a_number_as_id_group_or_answer_is_its_json_text_in_every_layout(value, text, more):
    record = parse_record({"id": value, "group": value, "prompt": "a", "answer": value, **more}, "data.jsonl", 1)
    assert (record.id, record.answer, record.group) == (text, text, text)
    assert record == parse_record({"id": text, "group": text, "prompt": "a", "answer": text, **more}, "data.jsonl", 1)


def test_the_text_column_of_alpaca_repeats_the_record_and_is_left_out():
    raw = {
        "instruction": "Add 1 and 1.",
        "input": "",
        "output": "2",
        "text": "Below is ...\nAdd 1 and 1.\n### Response:\n2",
    }
    record = parse_record(raw, "data.jsonl", 1)
    assert (record.layout, record.prompt_text, record.completion, record.text) == ("alpaca", "Add 1 and 1.", "2", None)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"prompt": "[INST] hi", "completion": "{x}"}, ("[INST] hi", "{x}", ())),
        (
            {"prompt": "[3, 1] sorted?", "completion": "[1, 3]", "rejected": "[3, 1]"},
            ("[3, 1] sorted?", "[1, 3]", ("[3, 1]",)),
        ),
        ({"prompt": '[{"role": "user", "content": "q"}]', "completion": '{"a": 1}'}, ("q", '{"a": 1}', ())),
        ({"prompt": "q", "completion": "a", "rejected": '["b", "c"]'}, ("q", "a", ("b", "c"))),
    ],
)
def test_a_cell_of_csv_is_json_only_where_it_holds_messages_or_answers(cells, expected):
    record = parse_record(cells, "a.csv", 1, strings=True)
    assert (record.prompt_text, record.completion, record.rejected) == expected

"""Layouts of other tools, as their documentation shows them, become the same records as the native ones."""

import pytest

from tuning.data.layouts import LAYOUTS, detect
from tuning.data.records import RecordError, parse_record

USER, BOT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}


def parse(raw, **settings):
    return parse_record(raw, "s", 1, **settings)


CASES = {
    "prompt only": ({"prompt": "q"}, "native", {"prompt": "q"}),
    "prompt and completion": ({"prompt": [USER], "completion": [BOT]}, "native", {"prompt": "q", "completion": "a"}),
    "messages": ({"messages": [USER, BOT]}, "native", {"prompt": "q", "completion": "a"}),
    "preference": (
        {"chosen": [USER, BOT], "rejected": [USER, {"role": "assistant", "content": "b"}]},
        "native",
        {"prompt": "q", "completion": "a", "rejected": "b"},
    ),
    "kto": (
        {"prompt": "q", "completion": "a", "label": False},
        "native",
        {"prompt": "q", "completion": "a", "label": False},
    ),
    "alpaca": ({"instruction": "q", "input": "", "output": "a"}, "alpaca", {"prompt": "q", "completion": "a"}),
    "alpaca with input": (
        {"instruction": "Sum.", "input": "1 2", "output": "3"},
        "alpaca",
        {"prompt": "Sum.\n\n1 2", "completion": "3"},
    ),
    "alpaca with history": (
        {"instruction": "q", "output": "a", "system": "s", "history": [["h", "i"]]},
        "alpaca",
        {
            "messages": [
                *({"role": "system", "content": "s"}, {"role": "user", "content": "h"}),
                *({"role": "assistant", "content": "i"}, USER, BOT),
            ]
        },
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
        "sharegpt",
        {"messages": [{"role": "system", "content": "s"}, USER, BOT]},
    ),
    "sharegpt with roles": ({"conversations": [USER, BOT]}, "sharegpt", {"messages": [USER, BOT]}),
    "sharegpt with calls": (
        {
            "conversations": [
                *(
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": '{"name":"f","arguments":{"x":1}}'},
                ),
                *({"from": "observation", "value": "r"}, {"from": "gpt", "value": "a"}),
            ],
            "tools": '[{"name": "f"}]',
        },
        "sharegpt",
        {"messages": [USER, CALL, {"role": "tool", "content": "r"}, BOT], "tools": [{"name": "f"}]},
    ),
    "hh": (
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
        "hh",
        {"prompt": "q", "completion": "a", "rejected": "b"},
    ),
    "reward spec": (
        {
            "data_source": "d",
            "prompt": [USER],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"index": 3},
        },
        "verifiable",
        {
            "prompt": "q",
            "answer": "4",
            "metadata": {
                "data_source": "d",
                "ability": "math",
                "extra_info": {"index": 3},
                "reward": {"style": "rule"},
            },
        },
    ),
    "question and answer": ({"question": "q", "answer": 4}, "verifiable", {"prompt": "q", "answer": "4"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layout_is_found_and_becomes_the_native_record(name):
    raw, layout, native = CASES[name]
    found, expected = parse(raw), parse(native, layout="native")
    assert (found.layout, detect(raw)) == (layout, layout)
    assert found.content == expected.content and found.prompt == expected.prompt
    assert found.conversation == expected.conversation
    assert parse(raw, layout=layout).content == expected.content


def test_every_layout_has_a_case():
    assert {layout for _, layout, _ in CASES.values()} | {"text"} == set(LAYOUTS)


def test_documents():
    document = parse({"text": " Once upon a time"})
    assert (document.text, document.prompt, document.completion) == (" Once upon a time", (), None)
    assert document.layout == "text" and document.group != parse({"text": "Other"}).group
    assert document.prompt_text == ""


@pytest.mark.parametrize(
    ("raw", "settings", "message"),
    [
        ({"instruction": 3, "output": "a"}, {}, "`instruction`: expected the task as a string, got int"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, {}, "`history`: expected pairs"),
        ({"conversations": "q"}, {}, "`conversations`: expected a list of turns, got str"),
        ({"conversations": [{"from": "alien", "value": "q"}]}, {}, "`conversations.from`: expected one of human"),
        (
            {"conversations": [{"from": who, "value": "q"} for who in ("gpt", "human", "gpt")]},
            {},
            "a user's turn before",
        ),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, {}, "expected JSON"),
        ({"question": "q"}, {}, "`answer`: expected an answer"),
        ({"prompt": "q"}, {"layout": "alpaca"}, "`instruction`: expected the task as a string, got nothing"),
        ({"text": "x"}, {"layout": "native"}, None),
        ({"text": "x", "prompt": "y"}, {}, "neither prompt nor completion"),
        ({"text": "x", "split": "prompts"}, {}, "'sft' or nothing"),
        ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "x"}, {"layout": "hh"}, "a text that starts with"),
    ],
)
def test_what_does_not_fit_names_the_field(raw, settings, message):
    if message is None:
        assert parse(raw, **settings).text == "x"
        return
    with pytest.raises(RecordError) as error:
        parse(raw, **settings)
    assert message in str(error.value) and "s, record 1" in str(error.value)


def test_columns_are_renamed_or_left_out():
    raw = {"q": "hello", "a": "4", "noise": 1, "prompt": None}
    found = parse(raw, rename={"q": "prompt", "a": "answer", "noise": None})
    assert (found.prompt_text, found.answer, found.metadata) == ("hello", "4", "{}")


def test_cells_of_csv_get_the_types_of_the_layout():
    cells = {"prompt": "q", "completion": "7", "label": "True", "answer": "", "metadata": '{"n": 1}'}
    found = parse(cells, strings=True)
    assert (found.completion, found.label, found.answer, found.metadata) == ("7", True, None, '{"n":1}')
    assert parse({"prompt": "q", "completion": "a", "rejected": "b", "margin": "0.5"}, strings=True).margin == 0.5
    with pytest.raises(RecordError, match="`label`: expected true or false"):
        parse({"prompt": "q", "completion": "a", "label": "maybe"}, strings=True)
    with pytest.raises(RecordError, match="`messages`: expected JSON"):
        parse({"messages": "[{"}, strings=True)

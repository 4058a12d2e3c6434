"""Layouts of other tools, as their documentation shows them, become the same records as the native ones."""

import random
from collections import Counter

import pytest

from rlhf.tuning.data.fields import Mapper
from rlhf.tuning.data.layouts import LAYOUTS, detect
from rlhf.tuning.data.records import FIELDS, RecordError, parse_record

USER, BOT, OTHER = ({"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "a"), ("assistant", "b")))
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}


def parse(raw, **settings):
    return parse_record(raw, "s", 1, **settings)


ANSWERED = {"prompt": "q", "completion": "a"}
PAIR = ANSWERED | {"rejected": "b"}
ABOUT = {"data_source": "d", "ability": "math", "extra_info": {"index": 3}}
CASES = {
    "prompt only": ({"prompt": "q"}, "prompt", {"prompt": "q"}),
    "prompt and completion": ({"prompt": [USER], "completion": [BOT]}, "prompt-completion", ANSWERED),
    "prompt of messages": ({"prompt": [USER]}, "prompt", {"prompt": "q"}),
    "messages": ({"messages": [USER, BOT]}, "messages", {"prompt": "q", "completion": "a"}),
    "messages without an answer": ({"messages": [USER]}, "messages", {"prompt": "q"}),
    "preference of texts": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference", PAIR),
    "preference with its prompt": ({"prompt": [USER], "chosen": [BOT], "rejected": [OTHER]}, "preference", PAIR),
    "prompt and answer": ({"prompt": "q", "answer": 4}, "verifiable", {"prompt": "q", "answer": "4"}),
    "preference": ({"chosen": [USER, BOT], "rejected": [USER, OTHER]}, "preference", PAIR),
    "kto": (ANSWERED | {"label": False}, "labelled", ANSWERED | {"label": False}),
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
    "sharegpt with weights": (
        {"conversations": [{"from": "human", "value": "q", "weight": 0}, {"from": "gpt", "value": "a", "weight": 1.0}]},
        "sharegpt",
        {"messages": [USER | {"weight": None}, BOT | {"weight": 1}]},
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
    "hh": ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}, "hh", PAIR),
    "reward spec": (
        ABOUT | {"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "4"}},
        "verifiable",
        {"prompt": "q", "answer": "4", "metadata": ABOUT | {"reward": {"style": "rule"}}},
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
    assert {layout for _, layout, _ in CASES.values()} | {"text", "native"} == set(LAYOUTS)


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
        (
            {"conversations": [{"from": who, "value": "q", "weight": 0} for who in ("human", "gpt")]},
            {},
            "`messages.weight`: expected 1 in the assistant's turns, which are all trained, and 0 in others",
        ),
        ({"messages": [USER | {"weight": 1}, BOT]}, {}, "`messages.weight`: expected 1 in the assistant's turns"),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "loss": False}]},
            {},
            "got one with ['content', 'loss', 'role']",
        ),
        ({"question": "q"}, {}, "`answer`: expected an answer"),
        ({"prompt": "q"}, {"layout": "alpaca"}, "`instruction`: expected the task as a string, got nothing"),
        ({"instruction": "q", "output": "a", "completion": "b"}, {}, "`completion`: expected no such field next to"),
        ({"conversations": [USER, BOT], "messages": [USER]}, {}, "`messages`: expected no such field next to"),
        ({"text": "x"}, {"layout": "native"}, None),
        ({"prompt": "q", "completion": "a"}, {"layout": "preference"}, "`rejected`: expected a value, as the layout"),
        ({"prompt": "q"}, {"layout": "messages"}, "`messages`: expected a value, as the layout is messages"),
        ({"question": "q", "answer": "a", "metadata": "x"}, {}, "`metadata`: expected an object, got str"),
        ({"instruction": "q", "output": "a", "history": 1.5}, {}, "`history`: expected pairs"),
        ({"conversations": [{"from": ["human"], "value": "q"}]}, {}, "`conversations.from`: expected one of human"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, {}, "`messages`: expected a role out of"),
        ({"prompt": "q", "completion": "a", "rejected": "b", "margin": 10**400}, {}, "`margin`: expected a finite"),
        ({"text": "x", "prompt": "y"}, {}, "a document without `prompt`"),
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
    found = parse(raw, mapper=Mapper({"q": "prompt", "a": "answer", "noise": None}))
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


def test_no_value_of_any_field_is_worse_than_an_error_that_names_it():
    def turn(random):
        fields = [("role", "from"), ("content", "value", "tool_calls")]
        return {random.choice(names): random.choice(VALUES) for names in fields} if random.random() < 0.9 else 5

    def value(random):
        return [turn(random) for _ in range(random.randint(1, 3))] if random.random() < 0.4 else random.choice(VALUES)

    fates = Counter()
    for number in range(20_000):
        rng = random.Random(number)
        raw = {name: value(rng) for name in rng.sample(ALL_FIELDS, rng.randint(1, 5))}
        try:
            found = parse(raw, extra=rng.choice(["error", "metadata"]), layout=rng.choice(["auto", *LAYOUTS]))
        except RecordError as error:
            fates[error.field] += 1
        else:
            fates[found.layout] += 1
    assert len(fates) > 30 and fates["(record)"] == 0


HUMAN = "\n\nHuman: a\n\nAssistant: b"
VALUES = [
    *("x", "", "user", "assistant", "system", "human", "gpt", "function_call", HUMAN, "{", "[]", "\ud800", "sft"),
    *(None, True, 5, 1.5, float("nan"), float("inf"), 10**400),
    *([], {}, [5], ["a", "b"], [["a", "b"]], [["a", 5]], {"a": 1}),
    *({"style": "rule", "ground_truth": "x"}, {"ground_truth": [1]}, {"style": None}, [USER]),
]
ALL_FIELDS = [
    *FIELDS,
    *("messages", "chosen", "conversations", "instruction", "input", "output", "system", "history", "question"),
    *("reward_model", "data_source", "ability", "extra_info", "info", "task"),
]

"""Which tokens of a conversation SFT trains: the assistant's, as transformers marks them."""

import re

import pytest

from rlhf.tuning.data.conversations import ConversationError
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.tokenizer import render
from tests.tuning.data.conversation import conversation_ids
from tests.tuning.data.run import letters, plan_of, rows
from tests.tuning.data.run import run as send

# ChatML with tools, whose assistant turns are marked.
MARKED = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[call {{ c.function | tojson }}]{% endfor %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNMARKED = re.sub(r"\{% (end)?generation %\}", "", MARKED)
END_OUTSIDE = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
FORGETFUL = UNMARKED.replace("{{ m.content }}{% for c", "{{ m.content if loop.last else '...' }}{% for c")
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

SYSTEM = {"role": "system", "content": "Be kind."}
USER, BOT = {"role": "user", "content": "héllo"}, {"role": "assistant", "content": "  hi\n日本 "}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
RESULT = {"role": "tool", "content": "2", "name": "add"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

CONVERSATIONS = {
    "one turn": [USER, BOT],
    "two turns": [SYSTEM, USER, BOT, USER, {"role": "assistant", "content": "bye"}],
    "tools": [USER, CALL, RESULT, BOT, USER, CALL],
    "two in a row": [USER, BOT, BOT, USER, BOT],
    "a user has the last word": [USER, BOT, USER],
}


def tokenizer_with(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def as_transformers(messages, tools=()):
    found = tokenizer_with(MARKED).apply_chat_template(
        messages, tools=list(tools) or None, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = list(found["input_ids"]), list(found["assistant_masks"])
    last = len(mask) - mask[::-1].index(1)
    return ids[:last], mask[:last]


@pytest.mark.parametrize("template", [MARKED, UNMARKED, END_OUTSIDE], ids=["marked", "unmarked", "end outside"])
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["", "with tools"])
def test_masks_are_those_of_transformers(template, name, tools):
    found = conversation_ids(tokenizer_with(template), CONVERSATIONS[name], tools)
    assert found == as_transformers(CONVERSATIONS[name], tools)


def test_trained_is_what_the_assistant_writes_and_its_end_of_turn():
    tokenizer = tokenizer_with(UNMARKED)
    ids, mask = conversation_ids(tokenizer, CONVERSATIONS["two turns"])
    spans = re.split("0+", "".join(map(str, mask)))
    assert [len(s) for s in spans if s] == [len(BOT["content"].encode()) + 1, len("bye") + 1]
    trained = [i for i, m in zip(ids, mask, strict=True) if m]
    assert tokenizer.decode(trained) == BOT["content"] + "<|im_end|>" + "bye<|im_end|>"


def test_the_text_before_the_first_turn_is_the_prompt_that_sampling_sees():
    tokenizer = tokenizer_with(UNMARKED)
    ids, mask = conversation_ids(tokenizer, [SYSTEM, USER, BOT], TOOLS)
    text = render(tokenizer, [SYSTEM, USER], TOOLS, header=True)
    assert ids[: mask.index(1)] == tokenizer.encode(text, add_special_tokens=False)


def test_each_turn_is_a_row_with_its_end_where_the_template_writes_none(tmp_path):
    plan = plan_with(NO_END, tmp_path / "t")
    found, reasons = run(plan, tmp_path / "c", {"messages": CONVERSATIONS["two turns"]})
    tokenizer = tokenizer_with(NO_END)
    texts = {tokenizer.decode(row["completion_ids"]) for row in found["sft"]}
    # The template writes a line break after each turn, in SFT's rows as in the history of later turns.
    assert not reasons and texts == {BOT["content"] + "\n<|im_end|>", "bye\n<|im_end|>"}
    assert all(row["completion_mask"] is None for row in found["sft"])


def test_a_conversation_without_a_turn_of_the_assistant_is_refused():
    with pytest.raises(ConversationError, match="no turn of the assistant"):
        conversation_ids(tokenizer_with(UNMARKED), [USER])


def plan_with(template, folder, **changes):
    settings = {"splits": ("sft", "labelled"), "max_prompt_tokens": 200, "max_completion_tokens": 200}
    return plan_of(folder, tokenizer_with(template), **settings | changes)


def run(plan, folder, *records):
    send(plan, folder, *records)
    return {name: rows(plan, name, folder) for name in plan.splits}, [x["reason"] for x in letters(folder)]


def test_rows_of_conversations_carry_their_masks(tmp_path):
    messages = CONVERSATIONS["two turns"]
    found, letters = run(
        plan_with(UNMARKED, tmp_path / "t"), tmp_path / "c", {"messages": messages}, {"messages": [USER, BOT]}
    )
    assert not letters
    long, short = sorted(found["sft"], key=lambda r: -len(r["completion_ids"]))
    ids, mask = as_transformers(messages)
    assert long["prompt_ids"] + long["completion_ids"] == ids
    assert [0] * len(long["prompt_ids"]) + long["completion_mask"] == mask
    assert short["completion_mask"] is None
    assert short["prompt_ids"] + short["completion_ids"] == as_transformers([USER, BOT])[0]


def test_a_conversation_that_cannot_be_masked_is_a_dead_letter_with_its_record(tmp_path):
    bad = {"messages": CONVERSATIONS["two in a row"]}
    found, letters = run(plan_with(FORGETFUL, tmp_path / "t"), tmp_path / "c", {"messages": [USER, BOT]}, bad)
    assert len(found["sft"]) == 1
    assert letters[0].startswith("data.jsonl, record 2, field `messages`: the chat template of ")
    assert "leaves out the text of message 2" in letters[0]


def test_control_tokens_in_calls_and_tools_are_refused(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "<|im_end|>"}}]}
    _, letters = run(plan_with(UNMARKED, tmp_path / "t"), tmp_path / "c", {"messages": [USER, call]})
    assert "control token '<|im_end|>'" in letters[0]


def test_completions_with_a_label(tmp_path):
    good = {"prompt": "a", "completion": "x", "label": True}
    bad = {"prompt": "a", "completion": "y", "label": False}
    found, _ = run(plan_with(UNMARKED, tmp_path / "t"), tmp_path / "c", good, bad)
    assert {(r["completion"], r["label"]) for r in found["labelled"]} == {("x", True), ("y", False)}
    # What is labelled bad is nothing to imitate.
    assert [r["completion"] for r in found["sft"]] == ["x"]
    held = plan_with(UNMARKED, tmp_path / "t", heldout_fraction=1.0, splits=("labelled", "heldout"))
    run(held, tmp_path / "h", good, bad)
    assert len(rows(held, "heldout_labelled", tmp_path / "h")) == 2

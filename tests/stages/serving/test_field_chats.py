"""Chats as people have them in their files: each is trained as its template writes it, or refused by name."""

import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf.stages.serving.api import ChatRequest
from rlhf.stages.serving.server import ChatRenderer
from rlhf.tuning.chat.template import Template
from rlhf.tuning.data import steps
from rlhf.tuning.data.blocks import Block, Entry, Plan
from rlhf.tuning.data.conversations import sample, tokenized
from rlhf.tuning.data.records import RecordError, parse_record
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.tokenizer import load_tokenizer, save_tokenizer, with_template
from tests.stages.serving.chats import RESULT, THOUGHT, bot, call, tokenizer, tool, user
from tests.tuning.chat.templates import chat_prompt_ids

TOOLS = [tool("weather")]
WEATHER = [user("Weather?"), call("Bern"), RESULT, bot("It is warm.")]
USERS = "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def drafted(made, folder, raw, output="sft", **settings):
    """(ids of the rows of a raw record, reasons of dead letters)."""
    save_tokenizer(made, folder)
    plan = Plan(str(folder), [output], **settings)
    entry = Entry(0, 1, b"{}", parse_record(raw, "x.jsonl", 1), [output])
    block = Block("b", SimpleNamespace(label="x.jsonl"), 0, 1, [entry])
    steps.render(plan)(block)
    steps.tokenize(plan)(block)
    return [draft.ids for draft in entry.drafts], [letter["reason"] for letter in block.dead]


def prepared(made, *given, **settings):
    """The same with ids decoded."""
    found, dead = drafted(made, *given, **settings)
    return [{name: made.decode(ids) for name, ids in row.items()} for row in found], dead


def as_text(messages):
    """Arguments of calls as JSON text, as OpenAI's API has them."""
    made = json.loads(json.dumps(messages))
    for function in (one["function"] for message in made for one in message.get("tool_calls", ())):
        function["arguments"] = json.dumps(function["arguments"])
    return made


@pytest.mark.parametrize("name", ["qwen2_5", "lfm2", "llama3_1"])
def test_arguments_as_text_or_object_are_one_text(name, tmp_path):
    made = tokenizer(name)
    same = prepared(made, tmp_path, {"messages": WEATHER, "tools": TOOLS})
    for raw in (
        {"messages": as_text(WEATHER), "tools": TOOLS},
        {"messages": json.dumps(WEATHER), "tools": json.dumps(TOOLS)},
        {"messages": as_text(WEATHER), "tools": json.dumps(TOOLS)},
    ):
        assert prepared(made, tmp_path, raw) == same
    [row], dead = same
    assert '": {"city": "Bern"}}' in row["completion_ids"] and not dead


def test_a_template_without_calls_gets_them_as_episodes_write_them(tmp_path):
    [row], dead = prepared(byte_tokenizer(), tmp_path, {"messages": WEATHER, "tools": TOOLS}, max_prompt_tokens=9999)
    text = row["prompt_ids"] + row["completion_ids"]
    assert not dead and '"name": "weather", "description"' in text
    said = '<|im_start|>a\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>'
    assert said in text and "<|im_start|>u\n<tool_response>\nsunny\n</tool_response><|im_end|>" in text


def test_an_answer_that_is_a_call_is_trained(tmp_path):
    made = tokenizer("qwen2_5")
    turn = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call><|im_end|>'
    ask = {"prompt": [user("Weather?")], "tools": TOOLS}
    [row], _ = prepared(made, tmp_path, ask | {"completion": [call("Bern")]})
    assert row["completion_ids"] == turn % "Bern"
    pair = ask | {"chosen": [call("Bern")], "rejected": [call("Rome")]}
    [row], _ = prepared(made, tmp_path, pair, "preference")
    assert (row["chosen_ids"], row["rejected_ids"]) == (turn % "Bern", turn % "Rome")
    with pytest.raises(RecordError, match="answers that differ"):
        parse_record(pair | {"rejected": [call("Bern")]}, "x", 1)


@pytest.mark.parametrize(
    "name, turn", [("llama3", "Yo<|eot_id|>"), ("qwen3", "<think>\n\n</think>\n\n Yo\n<|im_end|>")]
)
def test_one_answer_is_one_text_in_chats_pairs_and_labels(name, turn, tmp_path):
    made = tokenizer(name)
    [chat], _ = prepared(made, tmp_path, {"messages": [user("Hi"), bot(" Yo\n")]})
    [pair], _ = prepared(made, tmp_path, {"prompt": "Hi", "chosen": " Yo\n", "rejected": "No"}, "preference")
    [label], _ = prepared(made, tmp_path, {"prompt": "Hi", "completion": " Yo\n", "label": True}, "labelled")
    assert chat["completion_ids"] == pair["chosen_ids"] == label["completion_ids"] == turn
    *_, last = prepared(made, tmp_path, {"messages": [user("A"), bot("B"), user("Hi"), bot(" Yo\n")]})[0]
    assert last["completion_ids"].endswith(turn)


def test_each_turn_is_a_row_where_thoughts_leave_the_history(tmp_path):
    messages = [user("Hi"), bot(THOUGHT + "Yo"), user("More"), bot(THOUGHT + "Done")]
    rows, dead = prepared(tokenizer("qwen3"), tmp_path, {"messages": messages})
    assert not dead and [row["completion_ids"] for row in rows] == [
        f"{THOUGHT}{text}<|im_end|>" for text in ("Yo", "Done")
    ]
    assert "hm, hm" not in rows[1]["prompt_ids"] and "Yo" in rows[1]["prompt_ids"]


def test_a_first_token_is_the_one_of_the_whole_text(tmp_path):
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    core.train_from_iterator(["Hello|user|assistant\n abcdefghijklmnopqrstuvwxyz<>"], trainer)
    template = (
        "{% for m in messages %}|{{ m.role }}|\n{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}|assistant|\n{% endif %}"
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=template
    )
    whole = made.encode("|user|\nhi</s>\n|assistant|\nHello</s>", add_special_tokens=False)
    for raw in ({"prompt": "hi", "completion": "Hello"}, {"messages": [user("hi"), bot("Hello")]}):
        [row], _ = drafted(made, tmp_path, raw)
        assert row["prompt_ids"] == chat_prompt_ids(made, [user("hi")])
        assert row["prompt_ids"] + row["completion_ids"] == whole


@pytest.mark.parametrize("template, reason", [
    (USERS, "leaves out the text of message 1 (role system); set base.chat_template"),
    (None, "is missing; name a file with one in base.chat_template"),
])  # fmt: skip
def test_a_row_that_the_template_does_not_write_in_full_is_refused(template, reason, tmp_path):
    made = byte_tokenizer()
    made.chat_template = template
    rows, [letter] = prepared(made, tmp_path, {"messages": [{"role": "system", "content": "2"}, user("2"), bot("22")]})
    assert not rows and letter.startswith("x.jsonl, record 1, field `messages`: the chat template of ")
    assert reason in letter


@pytest.mark.parametrize("messages", [
    [user("Hi"), bot("Yo") | {"tool_calls": []}],
    [user([{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]), bot([{"type": "text", "text": "Yo"}])],
    [{"role": "system", "content": ""}, user("Hi"), bot("Yo")],
    json.dumps([user("Hi"), bot("Yo")]),
])  # fmt: skip
def test_forms_of_one_chat_are_one_record(messages):
    assert parse_record({"messages": messages}, "x", 1) == parse_record({"messages": [user("Hi"), bot("Yo")]}, "x", 1)


def test_a_developer_is_the_system():
    first, second = ([{"role": role, "content": "Be kind."}, user("Hi"), bot("Yo")] for role in ("developer", "system"))
    assert parse_record({"messages": first}, "x", 1) == parse_record({"messages": second}, "x", 1)
    template = Template(byte_tokenizer())
    assert template.ids(first[:2]) == template.ids(second[:2])


@pytest.mark.parametrize("changes, field", [
    ({"content": [{"type": "image", "url": "x"}]}, "messages.content"),
    ({"tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}, "messages.tool_calls"),
    ({"tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}, "messages.tool_calls"),
])  # fmt: skip
def test_what_has_no_text_is_refused_by_field(changes, field):
    with pytest.raises(RecordError, match=f"field `{field}`"):
        parse_record({"messages": [user("Hi"), bot("Yo") | changes]}, "x", 1)


def test_values_of_the_template_are_the_recipes_and_a_records_own(tmp_path):
    made = byte_tokenizer()
    made.chat_template = tokenizer("qwen3").chat_template
    with_template(made, None, {"enable_thinking": False}, "2030-01-02")
    save_tokenizer(made, tmp_path / "saved")
    made = load_tokenizer(tmp_path / "saved")
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert made.decode(chat_prompt_ids(made, [user("Hi")])).endswith(closed)
    assert made.apply_chat_template([user("Hi")], add_generation_prompt=True, tokenize=False).endswith(closed)
    chat = {"messages": [user("Hi"), bot("Yo")]}
    [row], _ = prepared(made, tmp_path, chat)
    assert row["prompt_ids"].endswith(closed) and row["completion_ids"] == "Yo<|im_end|>"
    [row], _ = prepared(made, tmp_path, chat | {"chat_template_kwargs": {"enable_thinking": True}})
    assert row["completion_ids"] == "<think>\n\n</think>\n\nYo<|im_end|>"
    made.chat_template = "{{ strftime_now('%d %B %Y') }}" + USERS
    assert made.decode(chat_prompt_ids(made, [user("Hi")])).startswith("02 January 2030")
    for name in ("tokenize", "chat_template", "messages", "not a name"):
        with pytest.raises(ValueError, match="is not a value that a chat template can be given"):
            chat_prompt_ids(made, [user("Hi")], {name: "x"})


def test_a_request_has_the_context_of_a_record_with_its_values(tmp_path):
    made = tokenizer("qwen3")
    asked = {"messages": [{"role": "developer", "content": "Be kind."}, user("Hi")]}
    values = {"chat_template_kwargs": {"enable_thinking": False}}
    served = made.decode(ChatRenderer(made).context(ChatRequest.model_validate(asked | values)))
    chat = {"messages": [{"role": "system", "content": "Be kind."}, user("Hi"), bot("Yo")]}
    [row], _ = prepared(made, tmp_path, chat | values)
    assert served == row["prompt_ids"] and served.endswith("</think>\n\n")
    with pytest.raises(ValueError, match="'chat_template' is not a value"):
        wrong = {"chat_template_kwargs": {"chat_template": "{{ 7 }}"}}
        ChatRenderer(made).context(ChatRequest.model_validate(asked | wrong))


def test_a_prompt_may_open_the_thought_that_a_completion_continues(tmp_path):
    made = tokenizer("deepseek_r1_distill")
    [row], _ = prepared(made, tmp_path, {"prompt": "Hi", "completion": THOUGHT + "Yo"})
    assert row["prompt_ids"].endswith("<think>\n") and row["completion_ids"].startswith("hm, hm\n</think>")


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseekv3", "deepseekv3_training"])
@pytest.mark.parametrize("thought", ["hm, hm\n", "hm <think> hm\n"])
def test_a_completion_as_it_was_sampled_ends_a_thought_that_the_prompt_began(tmp_path, name, thought):
    text = thought + "</think>\n\nYo"
    [row], _ = prepared(tokenizer(name), tmp_path, {"prompt": "Hi", "completion": text})
    assert row["prompt_ids"].endswith("<think>\n") and row["completion_ids"].startswith(text)


def test_all_of_a_last_character_is_trained_where_the_template_ends_no_turn():
    made = tokenizer("glm4moe")
    [(ids, mask)] = tokenized(made, [sample(Template(made), [user("Hi"), bot("Yo 😊")])])
    trained = made.decode([i for i, one in zip(ids, mask, strict=True) if one])
    assert trained.endswith("Yo 😊</s>")


def test_a_thought_of_an_earlier_message_is_no_beginning_of_an_answer(tmp_path):
    made = tokenizer("qwen3")
    said = [user("Weather?"), bot("I look."), call("Bern"), RESULT, bot("It is warm.")]
    rows, reasons = prepared(made, tmp_path, {"messages": said, "tools": TOOLS, "id": "a"})
    assert not rows and "differently when the message follows" in reasons[0]


def test_each_turn_of_a_template_with_marks_keeps_its_thought(tmp_path):
    thought = "<think>{}</think>"
    said = [user("a"), bot(thought.format("one") + "A"), user("b"), bot(thought.format("two") + "B")]
    rows, reasons = prepared(tokenizer("glm4moe_training"), tmp_path, {"messages": said, "id": "a"})
    assert not reasons and [("one" in row["completion_ids"], "two" in row["completion_ids"]) for row in rows] == [
        (True, False),
        (False, True),
    ]

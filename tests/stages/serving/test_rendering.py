"""One conversation has one text: as the model's template writes it, in data and on the server alike (R31).

The templates are those of `chat_templates/`, with the byte tokenizer and the control tokens of each.
"""

import itertools

import pytest

from rlhf.stages.serving.api import ChatRequest
from rlhf.stages.serving.server import ChatRenderer
from rlhf.tuning.chat.template import Template, TemplateRefused
from rlhf.tuning.data.conversations import ConversationError, NoPrefix, sample, tokenized
from rlhf.tuning.models.tokenizer import turn_end
from tests.stages.serving.chats import CONTROL, RESULT, TEMPLATES, THOUGHT, bot, call, tokenizer, tool, user

SYSTEM = {"role": "system", "content": "Be kind."}
AGAIN = [user("And?"), call("Rome"), RESULT, bot("Too.")]
KINDS = {
    "one": [user("Hi"), bot("Yo {{ x }}")],
    "blanks": [user("Hi"), bot(" Yo\n")],
    "system": [SYSTEM, user("Hi"), bot("Yo")],
    "two": [user("Hi"), bot("Yo"), user("More"), bot("Done")],
    "thought": [user("Hi"), bot(THOUGHT + "Yo")],
    "thoughts": [user("Hi"), bot(THOUGHT + "Yo"), user("More"), bot(THOUGHT + "Done")],
    "call": [user("Weather?"), call("Bern")],
    "call with text": [SYSTEM, user("Weather?"), call("Bern", "I look.")],
    "result": [user("Weather?"), call("Bern"), RESULT, bot("It is warm.")],
    "two results": [user("Weather?"), call("Bern"), RESULT, bot("Warm."), *AGAIN],
}
# Templates of models that see images: their texts are lists of parts.
PARTS = {name: "leaves out the text of message 1" for name in ("idefics3_training", "smolvlm")}
REFUSED = {("gemma", "system"): "System role not supported", ("gemma_training", "system"): "System role not supported"}


def samples(template, messages):
    """(the messages of a sample, it) of a conversation: one, or one a turn."""
    try:
        return [(messages, sample(template, messages))]
    except NoPrefix:
        turns = [i for i, message in enumerate(messages, start=1) if message["role"] == "assistant"]
        return [(messages[:i], sample(template, messages[:i], every=False)) for i in turns]


def squeezed(text):
    return "".join(text.split())


def spoken(message):
    """Texts that are in a message's rendering, whatever the template makes of them."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [message["content"], *(one["name"] for one in calls), *(one["arguments"]["city"] for one in calls)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_trained_and_served_as_its_template_writes_it(name, kind):
    made, messages = tokenizer(name), KINDS[kind]
    tools = [tool("weather"), tool("tides")] if any("tool_calls" in message for message in messages) else []
    template = Template(made, tools)
    if refusal := PARTS.get(name) or REFUSED.get((name, kind)):
        with pytest.raises((TemplateRefused, ConversationError), match=refusal):
            samples(template, messages)
        return
    end = made.convert_ids_to_tokens(turn_end(made))
    found = samples(template, messages)
    for said, one in found:
        [(ids, mask)] = tokenized(made, [one])
        text = made.decode(ids)
        *_, last = [message for message in said if message["role"] == "assistant"]
        # Nothing is left out, but for thoughts of earlier turns.
        for message in said:
            for part in spoken(message):
                part = part if message is last else part.rpartition("</think>")[2]
                assert squeezed(part) in squeezed(text).replace("<think></think>", ""), (part, text)
        assert all(one["function"]["name"] in text for one in tools)
        # What is trained is what the assistant says, each turn with its end.
        pairs = itertools.groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
        runs = [list(run) for trained, run in pairs if trained]
        trained = [made.decode([index for index, _ in run]) for run in runs]
        turns = [message for message in said if message["role"] == "assistant"][-len(trained) :]
        for message, run in zip(turns, trained, strict=True):
            content = message["content"].rpartition("</think>")[2]
            assert squeezed(content) in squeezed(run) and "Hi" not in run and "sunny" not in run
            assert message is not last or [one.end() for one in CONTROL.finditer(run)][-1] == len(run), run
        if said[-1]["content"].startswith(THOUGHT):
            assert "hm, hm" in trained[-1]
        # The server's context of the same messages is the prompt of the last turn.
        before = made.decode(ids[: len(ids) - len(runs[-1])])
        asked = ChatRequest.model_validate({"messages": said[:-1], "tools": tools or None})
        served = made.decode(ChatRenderer(made).context(asked))
        assert served.startswith(before) and served[len(before) :] in ("", "<think>\n"), (served, before)
        # Without calls, or where the template writes them, the text is transformers' own.
        if not tools or (template._writes_calls and kind != "call with text"):
            options = {"tools": tools or None, "tokenize": False}
            whole = made.apply_chat_template(said, **options)
            if "strftime_now" not in made.chat_template and "hm, hm" not in text:
                assert whole.startswith(text.removesuffix(end)), (whole, text)


def test_templates_are_forty_and_few_conversations_are_refused():
    assert len(TEMPLATES) >= 40
    assert len(PARTS) * len(KINDS) + len(REFUSED) <= 0.06 * len(TEMPLATES) * len(KINDS)

"""Tools of the API: calls whole and as streams, calls that are asked for, and text that is none."""

import json
import types

import pytest

from rlhf.stages.serving.answers import Spoken
from rlhf.stages.serving.tools import Offer, Tool
from tests.stages.serving.support import ADD, QUESTION, SAID

CALL = SAID[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_an_answer_as_openai_has_it(client, stream):
    asked = client.chat.completions.create(model="tiny", messages=[QUESTION], tools=[ADD], temperature=0, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in asked]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        content, finish = "".join(chunk.delta.content or "" for chunk in chunks) or None, chunks[-1].finish_reason
        assert [call.index for call in calls] == [0]
    else:
        [choice] = asked.choices
        calls, content, finish = choice.message.tool_calls, choice.message.content, choice.finish_reason
    assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("function", "add", {"a": 2, "b": 3})
    ]
    assert (content, finish) == (None, "tool_calls")


def test_a_result_follows_its_call_also_without_a_session(client):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": "5"})
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=[ADD], temperature=0)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (SAID[1], "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_is_asked_for_is_begun_for_the_policy(client, choice):
    answer = client.chat.completions.create(
        model="tiny", messages=[QUESTION], tools=[ADD], temperature=0, tool_choice=choice
    )
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
    # The beginning is context: the policy has sampled the rest alone.
    assert answer.usage.completion_tokens < len(SAID[0]) - 20


def test_without_leave_to_call_the_text_is_content(client):
    answer = client.chat.completions.create(
        model="tiny", messages=[QUESTION], tools=[ADD], temperature=0, tool_choice="none"
    )
    assert answer.choices[0].message.content == SAID[0]
    assert answer.choices[0].message.tool_calls is None


def test_a_tool_is_written_as_the_client_gives_it():
    function = {"description": "Adds.", "name": "add", "strict": True, "parameters": {"type": "object"}}
    tool = {"function": function, "type": "function"}
    schema = Tool.model_validate(tool).schema_of()
    assert json.dumps(schema) == json.dumps(tool)
    assert Tool.model_validate(tool | {"function": function | {"parameters": None}}).schema_of()["function"] == {
        name: value for name, value in function.items() if name != "parameters"
    }


def test_a_malformed_call_makes_the_whole_text_content():
    offer = Offer([ADD], "hermes")
    text = f'{CALL}\n<tool_call>\n{{"name": "sub", "arguments": {{}}}}\n</tool_call>'
    assert (offer.read(text).calls, offer.read(text).content) == ([], text)
    assert len(offer.read(f"{CALL}\n{CALL}").calls) == 2


@pytest.mark.parametrize("parallel", [False, True])
def test_a_reply_that_leaves_out_a_call_is_not_complete(parallel):
    offer, twice = Offer([ADD], "hermes", parallel=parallel), types.SimpleNamespace(sent=f"{CALL}\n{CALL}")
    choice = Spoken(twice, offer, [], None)
    assert len(choice.reply(types.SimpleNamespace(tokens=[]))["tool_calls"]) == 1 + parallel
    assert choice.complete is parallel


@pytest.mark.parametrize("form", ["hermes", "llama", "gemma"])
def test_the_beginning_of_a_call_fits_its_form(form):
    rest = {"hermes": ' {"a": 1}}\n</tool_call>', "llama": ' {"a": 1}}', "gemma": "a=1)\n```"}[form]
    offer = Offer([ADD], form, "add")
    [call] = offer.read(offer.call_start + rest).calls
    assert (call.name, call.arguments) == ("add", {"a": 1})
    assert offer.call_start.startswith(Offer([ADD], form, "required").call_start)

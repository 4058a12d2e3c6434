"""Tools of the API under the chat templates of the families: calls, results, and contexts that only grow."""

import json
import types

import pytest

from rlhf.stages.serving.api import ChatRequest
from rlhf.stages.serving.server import Server
from rlhf.tuning.chat.calls import Call, render
from rlhf.tuning.models.tokenizer import turn_end
from rlhf.tuning.rollout.requests import Completion
from tests.tuning.chat import templates as t

FAMILIES = ("chatml", "qwen25", "qwen3", "llama", "gemma", "mistral", "smollm")
QUESTION = {"role": "user", "content": "How much is 2 + 3?"}
CALLS = [Call("add", {"a": 2, "b": 3}), Call("say", {"text": "it's 5"})]


@pytest.fixture(params=FAMILIES)
def server(request):
    """A server that has no engine: what is asked of it ends before one is."""
    tokenizer = t.of_family(request.param)
    if tokenizer is None:
        pytest.skip("the package of SmolLM2 is not installed")
    return Server(types.SimpleNamespace(generation=0), tokenizer, "policy", (turn_end(tokenizer),), 4096)


def asked(*messages, **fields):
    return ChatRequest.model_validate({"messages": [QUESTION, *messages], "tools": t.TOOLS, **fields})


def answer(server, job, text):
    """What the client gets where the policy says a text and ends its turn; it is recorded."""
    ids = [*server.renderer.renderer(t.TOOLS, {}).begun(text), *server._stops]
    said = server.text()
    choice = job.choice(said, 0)
    said.add(ids, True)
    done = Completion(ids, [-0.5] * len(ids), "eos")
    if job.session is not None:
        server._keep(job, 0, done, said, choice)
    return choice.whole(done)["message"], ids


@pytest.mark.slow
def test_a_conversation_with_tools_only_grows_and_reads_as_the_template_writes_it(server):
    session = server.sessions.of_call("one")
    first = server.read(asked(), session)
    text = render(CALLS, server.renderer.form)
    message, ids = answer(server, first, text)
    found = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]]
    assert found == [(call.name, call.arguments) for call in CALLS]
    results = [
        {"role": "tool", "tool_call_id": one["id"], "content": result}
        for one, result in zip(message["tool_calls"], ("5", "said"), strict=True)
    ]
    second = server.read(asked(message, *results), session)
    before = [*first.prompts[0], *ids]
    assert second.prompts[0][: len(before)] == before
    # The same history of a client without a session, rendered at once.
    alone = server.read(asked(message, *results), None)
    assert server.decode(second.prompts[0]) == server.decode(alone.prompts[0])
    assert all(result["content"] in server.decode(second.prompts[0][len(before) :]) for result in results)
    answer(server, second, "It is 5.")
    assert [len(part.calls) for part in session.parts()] == [2]


@pytest.mark.slow
def test_a_call_that_is_asked_for_is_begun_in_the_familys_form(server):
    job = server.read(asked(tool_choice={"type": "function", "function": {"name": "add"}}), None)
    plain = server.read(asked(), None)
    begun = job.prompts[0][len(plain.prompts[0]) :]
    assert job.prompts[0][: len(plain.prompts[0])] == plain.prompts[0]
    whole = render([CALLS[0]], server.renderer.form)
    start = server.decode(begun)
    assert whole.startswith(start) and "add" in start

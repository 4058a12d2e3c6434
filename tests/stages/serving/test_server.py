"""The OpenAI-compatible server answers the real `openai` client as the engine would, and refuses by name."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.live import EngineStopped, Live
from rlhf.tuning.rollout.requests import Request
from tests.stages.serving.support import ADD, CONFIG, CONTEXT, TOKENIZER
from tests.support import until

openai = pytest.importorskip("openai")
CHAT = [{"role": "user", "content": "What is 2 + 2?"}]


def of_function(**function):
    return {"type": "function", "function": function}


def test_a_completion_of_token_ids_is_the_engines(client, live):
    prompt = TOKENIZER.encode("one two three", add_special_tokens=False)
    asked = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=12, seed=5, n=2, logprobs=3, extra_body={"return_token_ids": True}
    )
    expected = live.submit(Request(prompt, 12, stop_ids=(TOKENIZER.eos_token_id,), seed=5, samples=2)).result()
    for choice, completion in zip(asked.choices, expected, strict=True):
        assert choice.token_ids == completion.tokens
        assert choice.logprobs.token_logprobs == pytest.approx(completion.logps, abs=1e-5)
        assert [len(row) for row in choice.logprobs.top_logprobs] == [3] * len(completion.tokens)
        assert choice.finish_reason == ("stop" if completion.stop == "eos" else "length")
    assert asked.usage.completion_tokens == sum(len(c.tokens) for c in expected)
    assert asked.usage.prompt_tokens == len(prompt)


def test_chat_goes_through_the_template_and_a_stream_is_the_answer_in_pieces(client):
    whole = client.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=30, seed=7, logprobs=True, top_logprobs=2
    )
    asked = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 30, "seed": 7}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content for c in chunks if c.choices)
    assert len(chunks) > 3
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    rows = whole.choices[0].logprobs.content
    assert len(rows) == whole.usage.completion_tokens
    assert all(len(r.top_logprobs) == 2 and r.logprob <= r.top_logprobs[0].logprob + 1e-5 for r in rows)


def test_greedy_answers_do_not_depend_on_who_else_asks(client):
    def ask(i):
        asked = client.completions.create(model="tiny", prompt=f"item {i % 3}", max_tokens=20, temperature=0)
        return asked.choices[0].text

    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(ask, range(9)))
    assert answers == [answers[i % 3] for i in range(9)]


@pytest.mark.parametrize("stop", [None, "\x00never"])
def test_offsets_of_a_stream_are_those_of_the_whole_answer(client, stop):
    """Text is held back that may begin a stop string, or a character of several tokens."""
    asked = {"model": "tiny", "prompt": "ab", "max_tokens": 40, "seed": 3, "logprobs": 0, "temperature": 2.0}
    asked |= {"stop": stop}
    whole = client.completions.create(**asked).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)]
    assert [offset for part in parts for offset in part.text_offset] == whole.text_offset
    assert [token for part in parts for token in part.tokens] == whole.tokens


def test_a_field_that_is_null_is_left_out(client):
    more = {"modalities": None, "audio": None, "reasoning_effort": None, "stop": None}
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=1, extra_body=more)
    assert answer.choices[0].finish_reason == "length"


def test_a_stop_string_is_not_in_the_text_and_ends_it(client):
    free = client.completions.create(model="tiny", prompt="abc", max_tokens=30, seed=1, temperature=1.2)
    whole = free.choices[0].text
    wanted = whole[len(whole) // 2 :][:2]
    for stream in (False, True):
        found = client.completions.create(
            model="tiny", prompt="abc", max_tokens=30, seed=1, temperature=1.2, stop=["\u2603", wanted], stream=stream
        )
        parts = list(found) if stream else [found]
        assert "".join(p.choices[0].text for p in parts) == whole[: whole.index(wanted)]
        assert parts[-1].choices[0].finish_reason == "stop"


def test_an_answer_ends_where_the_context_does(client):
    answer = client.completions.create(
        model="tiny", prompt="x" * 100, max_tokens=10**6, extra_body={"ignore_eos": True, "return_token_ids": True}
    )
    assert answer.choices[0].finish_reason == "length" and answer.usage.total_tokens == 200


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"logit_bias": {"5": 3}}, "logit_bias is not offered"),
        ({"extra_body": {"typo": 1}}, "typo"),
        ({"prompt": "x" * 300}, "the prompt has 300 tokens; the context is 200"),
        ({"prompt": [10**6]}, "token 1000000 is not one of the model's"),
        ({"prompt": []}, "prompt: List should have at least 1 item"),
        ({"prompt": [[]]}, "empty prompt"),
        ({"prompt": ["a"] * 1025}, "at most 1024"),
        ({"prompt": ["a"] * 9, "n": 128}, "at most 1024"),
        ({"stop": ["a"] * 20}, "stop: List should have at most 16 items"),
        ({"logprobs": 9}, "logprobs: Input should be less than or equal to 5"),
        ({"max_tokens": 0}, "max_tokens must be at least 1 unless echo is set"),
        ({"echo": True, "stream": True}, "echo is not offered with stream"),
        ({"echo": True, "max_tokens": 0, "prompt": "x" * 250}, "exceed"),
        ({"echo": True, "max_tokens": 0, "prompt": [10**6]}, "token 1000000 is not one"),
        ({"messages": [{"role": "user"}]}, "a message of role user needs content"),
        ({"messages": [{"role": "system", "content": None}]}, "a message of role system needs content"),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs needs logprobs: true"),
        ({"messages": CHAT, "tool_choice": "required"}, "'required' is not among the request's tools: none"),
        (
            {"messages": CHAT, "tools": [ADD], "tool_choice": of_function(name="sub")},
            "'sub' is not among .* tools: add",
        ),
        ({"messages": CHAT, "tools": [ADD, ADD]}, "two have the same name"),
        ({"messages": CHAT, "tools": [of_function(name="a b")]}, "tools.0.function.name"),
        ({"messages": CHAT, "tools": [of_function(name="a\nb")]}, "tools.0.function.name"),
        ({"messages": CHAT, "tools": [of_function(name="a", parameters={"type": 7})]}, "not a JSON schema"),
        ({"messages": CHAT, "tools": [{"type": "web_search"}]}, "tools.0.type"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client, asked, message):
    create = client.chat.completions.create if "messages" in asked else client.completions.create
    more = {} if "messages" in asked else {"prompt": "x"}
    with pytest.raises(openai.BadRequestError, match=message):
        create(**{"model": "tiny", "max_tokens": 5} | more | asked)


def test_an_unknown_model_role_or_route_is_answered_as_openai_does(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-4", prompt="x", max_tokens=5)
    assert unknown.value.code == "model_not_found" and "this server has tiny" in str(unknown.value)
    assert [m.id for m in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError, match="role") as role:
        client.chat.completions.create(model="tiny", messages=[{"role": "wizard", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as penalty:
        client.completions.create(model="tiny", prompt="x", suffix="y")
    assert "Value error" not in f"{role.value}{penalty.value}"
    with pytest.raises(openai.NotFoundError) as route:
        client.embeddings.create(model="tiny", input="x")
    assert route.value.body["message"] == "Not Found" and route.value.type == "invalid_request_error"


def test_a_client_that_leaves_frees_its_slots(client, live):
    stream = client.completions.create(
        model="tiny", prompt="abc", max_tokens=190, n=4, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    until(lambda: live._engine.idle, 20)


def test_a_closed_engine_says_so():
    engine = Engine(CONFIG, limits=Limits(slots=1, context=CONTEXT))
    live = Live(engine)
    stream = live.submit(Request([1], 5))
    with pytest.raises(EngineStopped) as failure:
        stream.result()
    assert "no weights" in str(failure.value.__cause__)
    with pytest.raises(EngineStopped):
        live.submit(Request([1], 5))
    live.close()

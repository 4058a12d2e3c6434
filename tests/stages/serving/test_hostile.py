"""No value of a request, and no failure, ends the engine for others; /health tells the truth."""

import asyncio
import json
import threading
import time

import httpx
import psutil
import pytest

from rlhf.stages.serving import answers, app
from rlhf.stages.serving.server import Server
from rlhf.tuning.rollout.engine.live import EngineStopped
from rlhf.tuning.rollout.requests import RefusedRequest, Request, Sampling
from tests.stages.serving.support import CONTEXT, QUESTION, STOPS, living, made_tokenizer, served, serving

HUGE = (3_000_000_000, 2**63, 10**30, -(2**31) - 1, -(10**30))
NUMBERS = {
    "top_k": (*HUGE, -2),
    "n": (0, *HUGE),
    "logprobs": (-1, 6, *HUGE),
    "stop_token_ids": ([-1], [2**31], [10**30], list(range(40))),
    "prompt": ([-1], [2**31], [10**30]),
    "temperature": (-1, 101, "NaN", "Infinity"),
    "top_p": (0, 1.5, "NaN"),
    "min_p": (-1, 2, "NaN"),
    "repetition_penalty": (0, -1, 1.1, 1e30, "NaN", "Infinity"),
    "max_tokens": (-1, 0, -(10**30)),
}
HARMLESS = {
    "seed": (*HUGE, -1),
    "max_tokens": (3_000_000_000, 10**30),
    "temperature": (1e-300, 1e-30, 100),
    "top_p": (1e-30, 1e-300),
    "min_p": (1e-300, 1.0),
    "top_k": (-1, 2**31 - 1),
    "stop_token_ids": ([2**31 - 1],),
}


def post(url, path="completions", **fields):
    body = {"prompt": "ab", "max_tokens": 2, **fields}
    # NaN and Infinity as some clients write them, which is no JSON.
    text = json.dumps(body).replace('"NaN"', "NaN").replace('"Infinity"', "Infinity")
    return httpx.post(f"{url}/v1/{path}", content=text, headers={"content-type": "application/json"}, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_that_no_engine_computes_with_are_refused_by_field(url, field):
    for value in NUMBERS[field]:
        answer = post(url, **{field: value})
        assert answer.status_code == 400, (value, answer.text)
        assert answer.json()["error"]["message"]
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


@pytest.mark.slow
@pytest.mark.parametrize("field", HARMLESS)
def test_numbers_that_only_look_odd_are_answered(url, field):
    for value in HARMLESS[field]:
        answer = post(url, **{field: value})
        assert answer.status_code == 200, (value, answer.text)


def test_the_engine_itself_refuses_what_does_not_fit_its_arrays():
    with pytest.raises(ValueError, match="top_k is 3000000000"):
        Sampling(top_k=3_000_000_000)
    with pytest.raises(ValueError, match="temperature is nan"):
        Sampling(temperature=float("nan"))
    with pytest.raises(RefusedRequest, match="-1 among its stop ids"):
        Request([1], 1, stop_ids=(-1,))


def broken(tokens):
    raise RuntimeError("this request's own code failed")


@pytest.mark.slow
def test_a_step_that_fails_ends_its_requests_and_not_the_engine(params):
    """A search for stop strings that raises stands for any failure of a step."""
    with living(params) as live, serving(served(live)) as url:
        before = live.submit(Request([5, 6, 7], 20, seed=1)).result()[0]
        beside = live.submit(Request([5, 6], 150, seed=1))
        beside.next()
        for request in (live.submit(Request([5], 9, seed=1, find_stop=broken)), beside):
            with pytest.raises(EngineStopped, match="dropped this request: this request's own code failed"):
                request.result()
        assert live.failure is None
        assert live.submit(Request([5, 6, 7], 20, seed=1)).result()[0] == before
        assert httpx.get(f"{url}/health").status_code == 200
        live.close()
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        answer = post(url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")


SURROGATE = '"\\ud800"'
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}


def tool(**parameters):
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def offering(**parameters):
    return {"messages": USER, "tools": tool(**parameters)}


def nested(depth):
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


USER = [{"role": "user", "content": "a"}]
CHATS = {
    "no messages": {"messages": []},
    "messages that are none": {"messages": "a"},
    "a message that is none": {"messages": [1]},
    "a role that is none": {"messages": [{"role": "root", "content": "a"}]},
    "content that is a number": {"messages": [{"role": "user", "content": 5}]},
    "a picture": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}]},
    "a part without type": {"messages": [{"role": "user", "content": [{}]}]},
    "arguments that are no object": {"messages": [*USER, CALLED]},
    "a pattern that is none": offering(properties={"a": {"pattern": "("}}),
    "a pattern that looks ahead": offering(properties={"a": {"pattern": "^(?=a)(a+)+$"}}),
    "a pattern that looks back": offering(properties={"a": {"pattern": r"^(a|b)*\1$"}}),
    "a pattern of many states": offering(properties={"a": {"pattern": "((a{1,99}){1,99}){9}"}}),
    "pattern properties": offering(patternProperties={"^(?!a)": {}}),
    "another draft below": offering(properties={"a": {"$schema": "http://json-schema.org/schema#"}}),
    "a name as long as a book": {"messages": [*USER, {"role": "tool", "name": "n" * 10**6, "content": "a"}]},
    "a schema as deep as a well": {"messages": USER, "tools": tool(**nested(100))},
    "too many tools": {"messages": USER, "tools": [t for i in range(129) for t in tool(title=str(i))]},
    "a form of answer": {"messages": USER, "response_format": {"type": "json_object"}},
    "an unknown field": {"messages": USER, "__class__": "os"},
    "a model of another's": {"messages": USER, "model": "../../etc/passwd"},
    "a long conversation": {"messages": USER * 3000},
    "many stops": {"messages": USER, "stop": ["a"] * 17},
    "a stop that is none": {"messages": USER, "stop": [{}]},
}


@pytest.mark.parametrize("case", CHATS)
def test_conversations_that_nobody_can_answer_are_refused(url, case):
    answer = httpx.post(f"{url}/v1/chat/completions", json={"max_tokens": 2, **CHATS[case]}, timeout=60)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["message"]


BODIES = {
    "no JSON": b"{",
    "null": b"null",
    "bytes": bytes(range(256)),
    "NUL": b'{"prompt": "a\x00"}',
    "half a character": '{"prompt": "\u00e9"}'.encode()[:-4],
    "a number of 10,000 digits": b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    "a list as deep as a well": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "an object as deep as a well": b'{"prompt": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    "half a surrogate": b'{"prompt": ' + SURROGATE.encode() + b"}",
    "mixed prompts": b'{"prompt": ["a", 1]}',
    "a prompt of true": b'{"prompt": [true, false]}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16-le")[:-1],
}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"prompt": "a",}', "Invalid JSON: trailing comma at line 1 column "),
        (b"", "Invalid JSON: EOF"),
        (b"[1]", "Input should be an object"),
    ],
)
def test_a_body_that_is_no_json_object_is_named_as_such(url, body, told):
    answer = httpx.post(f"{url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.json()["error"]["message"].startswith(told), answer.text
    assert answer.json()["error"]["param"] is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("presence_penalty", 0.5), ("response_format", {"type": "json_object"}), ("best_of", 3), ("top_k", 3_000_000_000)],
)
def test_a_field_that_the_engine_cannot_do_is_named(url, field, value):
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", field: value})
    error = answer.json()["error"]
    assert answer.status_code == 400 and field in error["message"], answer.text
    assert field != "top_k" or error["param"] == field


@pytest.mark.slow
@pytest.mark.parametrize("case", BODIES)
def test_bodies_that_are_no_request_are_refused(url, case):
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{url}/v1/completions", content=BODIES[case], headers=headers, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    spoken = b'{"messages": [{"role": "user", "content": ' + SURROGATE.encode() + b"}]}"
    answer = httpx.post(f"{url}/v1/chat/completions", content=spoken, headers=headers, timeout=60)
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("name", ["a" * 129, "%00", "..%2f..%2fetc", "a%20b", "%F0%9F%92%A3", "a%0ab"])
def test_names_of_sessions_are_names(url, name):
    answer = post(f"{url}/sessions/{name}")
    assert answer.status_code in (400, 404), answer.text


REFUSING = (
    "{% if messages|length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}{{ messages[0].content }}"
)
BREAKING = "{{ messages[0].content + 1 }}"
UNDEFINED = "{{ messages[0].nothing.at_all }}"


@pytest.mark.parametrize(("template", "said"), [(REFUSING, "roles must alternate"), (BREAKING, ""), (UNDEFINED, "")])
def test_a_conversation_that_the_template_refuses_is_the_clients_fault(live, template, said):
    tokenizer = made_tokenizer()
    tokenizer.chat_template = template
    with serving(Server(live, tokenizer, "tiny", STOPS, CONTEXT)) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": USER * 2}, timeout=60)
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]
        assert "messages" in answer.json()["error"]["message"]


def test_usual_patterns_of_tools_are_taken(url):
    usual = (r"^\d{4}-\d{2}-\d{2}$", r"^[a-z]+(-[a-z]+)?$", r"^(red|green)$", r"^[\w.]+@[\w.]+$", r"^.{1,64}$")
    # Python's engine would not end; RE2 takes linear time.
    for pattern in (*usual, "^(a+)+$", "^(a|a)*$", "a?" * 500 + "a" * 500):
        asked = offering(properties={"a": {"pattern": pattern}}) | {"max_tokens": 1}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)
        assert answer.status_code == 200 or "tokens; the context is" in answer.text, answer.text


DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "object"}
DOUBLING = {"$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)} | {"a40": {}}}
LARGE = {
    "an enum that is compared pairwise": lambda: {"messages": USER, "tools": tool(**DRAFT_4, enum=[*range(8000), "a"])},
    "a schema of many properties": lambda: offering(properties={f"p{i}": {} for i in range(20_000)}),
    "many schemas": lambda: {
        "messages": USER,
        "tools": [
            {
                "type": "function",
                "function": {"name": f"f{n}", "parameters": {"required": [f"{n} {i}" for i in range(90)]}},
            }
            for n in range(128)
        ],
    },
    "ids and a text": lambda: {"prompt": [1] * 1_300_000 + ["a"]},
    "lists and a text": lambda: {"prompt": [[1]] * 600_000 + ["a"]},
    "texts and an id": lambda: {"prompt": ["abc"] * 600_000 + [1]},
    "empty lists": lambda: {"prompt": [[]] * 1_300_000},
    "objects": lambda: {"prompt": "a", "max_tokens": 1, "user": [{"a": 1}] * 300_000},
    "a text": lambda: {"prompt": "a b" * 1_300_000},
    "fields": lambda: {"prompt": "a", **{f"f{i}": 1 for i in range(300_000)}},
    "stop ids": lambda: {"prompt": "a", "stop_token_ids": [-1] * 1_300_000},
    "stops": lambda: {"prompt": "a", "stop": [1] * 1_300_000},
    "messages": lambda: {"messages": [{}] * 130_000},
    "parts": lambda: {"messages": [{"role": "user", "content": [1] * 1_300_000}]},
    "a message": lambda: {"messages": [{"role": "user", "content": "a b" * 1_300_000}]},
    "calls": lambda: {"messages": [{"role": "assistant", "tool_calls": [{"function": 1}] * 130_000}]},
    "a long call": lambda: {"messages": called(json.dumps({"a": "a b" * 1_300_000}))},
    "lists in a call": lambda: {"messages": called('{"a": [' + "[]," * 400_000 + "[]]}")},
    "many messages": lambda: {"messages": USER * 90_000},
    "values of the template": lambda: {"messages": USER, "chat_template_kwargs": {f"f{i}": 1 for i in range(300_000)}},
    "wrong values of the template": lambda: {
        "messages": USER,
        "chat_template_kwargs": {f"f{i}": None for i in range(250_000)},
    },
    "a text without an end": lambda: b"[" * 2**17 + b'["' + rb"\"" * 1_900_000,
    "fields of a tool": lambda: {"messages": USER, "tools": [tool(type="object")[0] | {"x": [0] * 1_300_000}]},
    "a description": lambda: {"messages": USER, "tools": [described("a b" * 1_300_000)]},
    "fields of a message": lambda: {"max_tokens": 1, "messages": [USER[0] | {f"f{i}": 1 for i in range(300_000)}]},
}

UNREAD = ("objects", "fields of a message")
"""Cases whose large values reach nothing."""
KINDS = (
    "an enum that is compared pairwise",
    "ids and a text",
    "a text",
    "fields",
    "messages",
    "a long call",
    *UNREAD[:1],
)
"""Cases of which the others are variants."""


def described(text):
    """A tool with this description."""
    return {"type": "function", "function": {"name": "f", "description": text}}


def called(arguments):
    """Messages with a call."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "5", "tool_call_id": "1"}]


def during(url, action):
    """(what an action in a thread returns, longest answer of /health in seconds, growth of this process in MB).

    Seconds of this process's processors: other processes of the machine slow each answer down.
    """
    process, slowest, peak, results = psutil.Process(), 0.0, 0, []
    before = process.memory_info().rss
    thread = threading.Thread(target=lambda: results.append(action()))
    thread.start()
    while thread.is_alive():
        began = time.process_time()
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        slowest = max(slowest, time.process_time() - began)
        peak = max(peak, process.memory_info().rss - before)
    return results[0], slowest, peak / 2**20


@pytest.mark.parametrize("case", [c if c in KINDS else pytest.param(c, marks=pytest.mark.slow) for c in LARGE])
def test_one_request_does_not_stop_the_server_nor_fill_its_memory(url, case):
    fields = LARGE[case]()
    body = fields if isinstance(fields, bytes) else json.dumps(fields, separators=(",", ":")).encode()
    path = "chat/completions" if not isinstance(fields, bytes) and "messages" in fields else "completions"
    del fields
    headers = {"content-type": "application/json"}
    answer, slowest, megabytes = during(
        url, lambda: httpx.post(f"{url}/v1/{path}", content=body, headers=headers, timeout=60)
    )
    assert answer.status_code == (200 if case in UNREAD else 400), answer.text[:200]
    assert len(answer.text) < 10_000
    assert slowest < 1 and megabytes < 150, (slowest, megabytes)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("completions", {"prompt": "ab", "logprobs": 5}),
        ("completions", {"prompt": [65, 66], "logprobs": 5, "echo": True}),
        ("chat/completions", {"messages": [QUESTION], "logprobs": True, "top_logprobs": 5}),
    ],
)
def test_log_probabilities_are_written_outside_of_the_event_loop(url, monkeypatch, path, asked):
    loops = []

    def piece(tokenizer, token):
        loops.append(asyncio._get_running_loop())
        return str(tokenizer.decode([token]))

    monkeypatch.setattr(answers, "_piece", piece)
    answer = httpx.post(f"{url}/v1/{path}", json={**asked, "max_tokens": 3}, timeout=60)
    assert answer.status_code == 200 and loops and set(loops) == {None}


def test_a_call_that_takes_too_long_to_compare_is_content(url):
    function = {"name": "add", "parameters": {**DOUBLING, "properties": {"a": {}, "b": {}}, "$ref": "#/$defs/a0"}}
    asked = {"messages": [QUESTION], "tools": [{"type": "function", "function": function}], "temperature": 0}
    answer, slowest, _ = during(url, lambda: httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60))
    [choice] = answer.json()["choices"]
    assert choice["message"]["content"].startswith("<tool_call>") and "tool_calls" not in choice["message"]
    assert slowest < 1


def test_ids_of_a_session_are_ids(url):
    for prompt in NUMBERS["prompt"]:
        answer = post(f"{url}/sessions/ids", prompt=prompt)
        assert answer.status_code == 400, answer.text


def test_samples_are_encoded_one_at_a_time(url, monkeypatch):
    texts = []
    dumps = json.dumps

    def recorded(*arguments, **options):
        texts.append(dumps(*arguments, **options))
        return texts[-1]

    monkeypatch.setattr(app.json, "dumps", recorded)
    for more in ({}, {"echo": True}):
        texts.clear()
        choices = post(url, n=3, logprobs=5, **more).json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        assert max(text.count("text_offset") for text in texts) == 1


def test_a_stream_that_fails_tells_no_more_than_a_whole_answer(url, monkeypatch):
    def fail(*_):
        raise RuntimeError("a path of the server")

    monkeypatch.setattr(answers.Completed, "delta", fail)
    answer = post(url, stream=True)
    assert "RuntimeError" in answer.text and "a path" not in answer.text

"""Sessions record a client's calls as ids that only grow, whatever the client sends back of them."""

import contextlib
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest

from rlhf.stages.serving.api import Message
from rlhf.stages.serving.sessions import Call, EvictedSession, Session, Sessions, signatures_of
from tests.stages.serving.support import (
    ADD,
    QUESTION,
    RESULT,
    SAID,
    STOPS,
    TOKENIZER,
    conversation,
    ids,
    served,
    serving,
)


@pytest.fixture
def session(url, request):
    """(URL, an OpenAI client) of a new session; it is deleted behind the test."""
    path = f"{url}/sessions/{request.node.name.partition('[')[0]}"
    yield path, openai.OpenAI(base_url=f"{path}/v1", api_key="none", max_retries=0, timeout=120)
    httpx.delete(path)


def agent(client, **options):
    """The conversation of an agent with one tool, as any program of the OpenAI SDK holds it."""
    messages = [QUESTION]
    for _ in range(3):
        answer = client.chat.completions.create(model="tiny", messages=messages, tools=[ADD], temperature=0, **options)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return messages
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
    raise AssertionError(messages)


def test_an_agent_becomes_one_row_of_exact_ids(session):
    path, client = session
    messages = agent(client)
    assert messages[-1]["content"] == SAID[1]
    record = httpx.get(path).json()
    first, call, between, answer = conversation()
    [part] = record["parts"]
    assert part["prompt_ids"] == first
    assert part["token_ids"] == [*call, *between, *answer]
    unknown = [False] * len(call) + [True] * len(between) + [False] * len(answer)
    assert [logp is None for logp in part["logprobs"]] == unknown
    assert part["turns"] == [0, 1]
    assert [turn["policy"] for turn in record["turns"]] == ["the-digest"] * 2
    assert [turn["reply"]["content"] for turn in record["turns"]] == [None, SAID[1]]


def test_what_clients_change_of_an_answer_changes_no_id(session):
    """Other ids of calls, spaces, fields that are left out or added, and arguments written otherwise."""
    path, client = session
    said = client.chat.completions.create(model="tiny", messages=[QUESTION], tools=[ADD], temperature=0)
    [call] = said.choices[0].message.tool_calls
    other = {"id": "other", "type": "function", "function": {"name": "add", "arguments": '{"b":3,  "a":2}'}}
    copy = {"role": "assistant", "content": " ", "refusal": None, "annotations": [], "tool_calls": [other]}
    result = {"role": "tool", "tool_call_id": "other", "content": [{"type": "text", "text": "5"}]}
    answer = client.chat.completions.create(model="tiny", messages=[QUESTION, copy, result], tools=[ADD], temperature=0)
    assert call.function.arguments == '{"a": 2, "b": 3}'
    assert answer.choices[0].message.content == SAID[1]
    assert [part["turns"] for part in httpx.get(path).json()["parts"]] == [[0, 1]]


def test_what_goes_on_from_nothing_or_from_the_middle_is_a_part_of_its_own(session):
    path, client = session
    agent(client)
    first, call, between, _ = conversation()
    again = {"messages": [QUESTION], "tools": [ADD], "temperature": 0, "model": "tiny", "max_tokens": 4}
    client.chat.completions.create(**again)
    client.chat.completions.create(**again | {"messages": [{"role": "user", "content": "new"}]})
    asked = [QUESTION, {"role": "assistant", "content": "I never said that."}, {"role": "user", "content": "x"}]
    client.chat.completions.create(**again | {"messages": asked})
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}]
    middle = [QUESTION, {"role": "assistant", "tool_calls": calls}, RESULT | {"tool_call_id": "c", "content": "6"}]
    client.chat.completions.create(**again | {"messages": middle})
    parts = httpx.get(path).json()["parts"]
    assert [part["turns"] for part in parts] == [[0, 1], [2], [3], [4], [5]]
    assert parts[1]["prompt_ids"] == first
    # The answer that went another way in the first part is context in the last one: the stored ids.
    assert parts[4]["prompt_ids"] == [*first, *call, *_six(between)]
    assert all(None not in part["logprobs"] for part in parts[1:])


def _six(between):
    return [ids("6")[0] if token == ids("5")[0] else token for token in between]


def test_samples_of_one_call_are_parts_and_streams_are_recorded(session):
    path, client = session
    client.chat.completions.create(model="tiny", messages=[QUESTION], n=2, seed=1, max_tokens=3, temperature=1.5)
    for _ in client.chat.completions.create(model="tiny", messages=[QUESTION], max_tokens=3, stream=True):
        pass
    record = httpx.get(path).json()
    assert [part["turns"] for part in record["parts"]] == [[0], [1], [2]]
    assert all(len(turn["token_ids"]) == len(turn["logprobs"]) > 0 for turn in record["turns"])


def test_completions_continue_stored_ids(session):
    path, client = session
    prompt, more = ids("one two"), ids(" three")
    asked = {"model": "tiny", "max_tokens": 6, "seed": 3, "extra_body": {"return_token_ids": True}}
    first = client.completions.create(prompt=prompt, **asked).choices[0]
    client.completions.create(prompt=[*prompt, *first.token_ids, *more], **asked)
    [part] = httpx.get(path).json()["parts"]
    assert part["turns"] == [0, 1]
    assert part["prompt_ids"] == prompt
    assert part["token_ids"][: len(first.token_ids) + len(more)] == [*first.token_ids, *more]


def test_what_a_stop_string_cuts_off_is_in_no_context_of_a_client_that_lacks_it(session):
    path, client = session
    asked = {"model": "tiny", "messages": [QUESTION], "temperature": 0, "max_tokens": 9}
    said = client.chat.completions.create(**asked, stop=["tool"]).choices[0].message.content
    assert said == "<"
    messages = [QUESTION, {"role": "assistant", "content": said}, QUESTION]
    client.chat.completions.create(**asked | {"messages": messages})
    first, second = httpx.get(path).json()["parts"]
    assert TOKENIZER.decode(first["token_ids"]) == "<tool"
    written = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert TOKENIZER.decode(second["prompt_ids"]) == written


@pytest.mark.parametrize(
    ("stop", "more", "turns"), [("is", "is 7", [[0, 1]]), ("is", "was", [[0], [1]]), ("x", "x", [[0], [1]])]
)
def test_a_completion_goes_on_where_its_ids_are_the_clients_text(session, stop, more, turns):
    path, client = session
    first, call, between, _ = conversation()
    prompt = TOKENIZER.decode([*first, *call, *between])
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 20}
    said = client.completions.create(prompt=prompt, stop=[stop], **asked).choices[0].text
    assert said == ("It " if stop == "is" else "It is 5.")
    client.completions.create(prompt=prompt + said + more, **asked)
    record = httpx.get(path).json()
    assert [part["turns"] for part in record["parts"]] == turns
    part, ids_of_last = record["parts"][-1], record["turns"][1]["token_ids"]
    before = part["prompt_ids"] + part["token_ids"][: len(part["token_ids"]) - len(ids_of_last)]
    assert TOKENIZER.decode(before) == prompt + said + more


def test_a_session_is_rewarded_read_and_forgotten(url, session):
    path, client = session
    assert httpx.post(f"{path}/reward", json={"reward": 1}).status_code == 404
    client.chat.completions.create(model="tiny", messages=[QUESTION], max_tokens=2)
    assert httpx.post(f"{path}/reward", json={"reward": 0.5, "success": True}).status_code == 200
    assert httpx.post(f"{path}/reward", json={"reward": "lots"}).status_code == 400
    record = httpx.get(path).json()
    assert (record["reward"], record["success"]) == (0.5, True)
    assert httpx.delete(path).json()["turns"] == 1
    assert httpx.get(path).json()["error"]["code"] == "session_not_found"


def test_the_session_that_was_not_used_for_longest_leaves_and_its_client_is_told(url):
    asked = {"messages": [QUESTION], "max_tokens": 1}
    for name in "abcabd":
        assert httpx.post(f"{url}/sessions/{name}/v1/chat/completions", json=asked, timeout=60).status_code == 200
    gone = httpx.post(f"{url}/sessions/c/v1/chat/completions", json=asked)
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "session_evicted")
    assert "holds 3 sessions" in gone.json()["error"]["message"]
    assert [httpx.delete(f"{url}/sessions/{name}").status_code for name in "abcd"] == [200, 200, 410, 200]


def test_sessions_leave_for_the_tokens_of_others():
    sessions = Sessions(max_sessions=10, tokens=400)
    for name in "ab":
        session = sessions.of_call(name)
        call = session.open("chat", None, [1] * 200, messages=[], signatures=(), policy=None)
        session.keep(call, {"content": "x"}, ("assistant", "x", ()))
        sessions.evict(keep=sessions.get(name))
    assert sessions.get("b").tokens == 328
    with pytest.raises(EvictedSession):
        sessions.of_call("a")
    with pytest.raises(ValueError, match="letters, digits"):
        sessions.of_call("../b")


def test_episodes_that_begin_and_end_in_threads_disturb_no_call_of_another():
    sessions = Sessions(max_sessions=sys.maxsize, tokens=sys.maxsize, closed=True)
    for number in range(64):
        sessions.add(Session(f"s{number}"))
    over = threading.Event()

    def episodes(thread):
        while not over.is_set():
            sessions.add(Session(thread))
            sessions.remove(thread)

    threads = [threading.Thread(target=episodes, args=(f"thread{n}",)) for n in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for call in range(30_000):
            sessions.evict(keep=sessions.of_call(f"s{call % 64}"))
    finally:
        over.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()


def test_thoughts_that_a_client_leaves_out_stay_in_the_ids():
    session = Session("s")
    call = session.open("chat", None, [1, 2], messages=[], signatures=(("user", "q", ()),), policy=None)
    call.token_ids = [3, 4]
    reply = {"role": "assistant", "content": "<think>hm</think>\nyes"}
    session.keep(call, reply, *signatures_of([Message(**reply)]))
    told = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes", "reasoning_content": "hm"}]
    found, used = session.find("chat", signatures_of([Message(**message) for message in told]))
    assert isinstance(found, Call) and (found.ids(), used) == ([1, 2, 3, 4], 2)
    assert session.find("chat", signatures_of([Message(role="user", content="other")])) == (None, 0)


def test_a_malformed_call_is_recorded_as_the_policys_fault(session):
    """The beginning of a call is asked for, and its end is cut off."""
    path, client = session
    asked = {"messages": [QUESTION], "tools": [ADD], "tool_choice": "required", "max_tokens": 2, "temperature": 0}
    message = client.chat.completions.create(model="tiny", **asked).choices[0].message
    assert message.tool_calls is None and message.content.startswith('<tool_call>\n{"name": "')
    [turn] = httpx.get(path).json()["turns"]
    # What was written for the policy is context, and has no log-probability.
    assert TOKENIZER.decode(turn["context_ids"]).endswith('<tool_call>\n{"name": "')
    assert (turn["valid"], len(turn["logprobs"])) == (False, 2)


def test_a_turn_that_was_cut_off_is_ended_for_the_next(session):
    path, client = session
    first = client.chat.completions.create(model="tiny", messages=[QUESTION], max_tokens=3, temperature=0)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    client.chat.completions.create(model="tiny", messages=[QUESTION, said, QUESTION], max_tokens=3, temperature=0)
    [part] = httpx.get(path).json()["parts"]
    assert part["token_ids"][3 : 3 + 1] == list(STOPS)
    assert TOKENIZER.decode(part["token_ids"][4:-3]) == "\n<|im_start|>u\n2+3?<|im_end|>\n<|im_start|>a\n"


def test_calls_and_text_that_a_template_leaves_out_take_of_the_sessions_tokens():
    """A call of one token takes two kilobytes of memory."""
    session = Session("a")
    for fields in ({"content": "x" * 16_000}, {"content": "", "name": "x" * 16_000}):
        call = session.open("chat", None, [1], messages=[{"role": "tool", **fields}], signatures=(), policy=None)
        assert 1128 <= call.size < 1228
    assert session.open("chat" + "t" * 16_000, None, [1], messages=[], signatures=(), policy=None).size == 1128


def test_ids_are_found_among_many_calls():
    """The time grew with the product of calls and their tokens: 42 s here."""
    session, before = Session("a"), None
    for number in range(30_000):
        before = before if number % 2000 else None
        before = session.open("text", before, [1], messages=[], signatures=(), policy=None)
        before.token_ids = [2]
        session.keep(before, {"content": "x"}, ("assistant", "x", ()))
    began = time.process_time()
    assert session.find_ids("text", [1, 2] * 1990 + [3]).number == 28_000 + 1989
    assert session.find_ids("text", [2]) is None and session.find_ids("chat", [1, 2]) is None
    assert time.process_time() - began < 10


def with_a_large_one(calls):
    sessions = Sessions(max_sessions=3, tokens=10**8)
    session = sessions.of_call("big")
    for _ in range(calls):
        call = session.open("chat", None, [7] * 10_000, messages=[], signatures=(), policy=None)
        session.keep(call, {"content": "x"}, ("assistant", "x", ()))
    return sessions


def test_readers_of_a_large_session_stop_nobody(live):
    sessions = with_a_large_one(calls=20)
    slowest = 0.0
    with serving(served(live, sessions=sessions)) as url, ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(httpx.get, f"{url}/sessions/big", timeout=60) for _ in range(10)]
        while not all(one.done() for one in asked):
            start = time.monotonic()
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
            slowest = max(slowest, time.monotonic() - start)
    assert all(len(one.result().json()["turns"]) == 20 for one in asked) and slowest < 10


@pytest.mark.slow
def test_readers_that_take_nothing_of_a_large_session_hold_no_request_and_little_memory(live):
    sessions = with_a_large_one(calls=100)
    process = psutil.Process()
    asked = {"prompt": "ab", "max_tokens": 1}
    with serving(served(live, sessions=sessions)) as url, contextlib.ExitStack() as open_sockets:
        host, port = url.removeprefix("http://").split(":")
        before = process.memory_info().rss
        for _ in range(20):
            client = open_sockets.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(b"GET /sessions/big HTTP/1.1\r\nHost: localhost\r\n\r\n")
        began = time.monotonic()
        assert httpx.post(f"{url}/v1/completions", json=asked, timeout=120).status_code == 200
        took = time.monotonic() - began
        time.sleep(5.0)
        grown = process.memory_info().rss - before
    assert took < 60 and grown < 60e6, (took, grown)

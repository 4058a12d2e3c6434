"""A judge on a real server that speaks as OpenAI's does: the last number of its reply counts, or the error says why."""

import contextlib
import socket
import threading

import pytest

from rlhf.tuning.rewards.failures import Outage
from rlhf.tuning.rewards.judge import JudgeFailed, judge, longest_seconds
from tests.judge_server import judge_server


@pytest.fixture
def server():
    """(URL, list of requests, list of replies to give: a status or a text)."""
    replies = []
    with judge_server(lambda body: replies.pop(0)) as (url, asked):
        yield url, asked, replies


def ask(url, **more):
    return judge(["2 + 2?"], ["4"], url=url, model="m", answer=["four"], **more)


def test_the_last_number_of_the_reply_counts(server, monkeypatch):
    url, asked, replies = server
    monkeypatch.setenv("MY_KEY", "k")
    replies += [429, "Of 10 points: 7.5"]
    assert ask(url, key_variable="MY_KEY") == [0.75]
    (path, key, body) = asked[-1]
    assert (path, key, body["model"], len(asked)) == ("/v1/chat/completions", "Bearer k", "m", 2)
    assert all(t in body["messages"][0]["content"] for t in ("2 + 2?", "four", "from 0 to 10"))
    replies.append("1")
    assert ask(url, template="{completion}", low=-1.0, high=1.0) == [1.0]
    assert asked[-1][2]["messages"][0]["content"] == "4"


def test_where_code_is_limited_a_key_goes_to_its_listed_host_alone(server, monkeypatch):
    url, asked, replies = server
    monkeypatch.setenv("MY_KEY", "k")
    monkeypatch.setenv("RLHF_ALLOW_CODE", "none")
    for listed in ("", "MY_KEY@api.example.org,OTHER@127.0.0.1"):
        monkeypatch.setenv("RLHF_ALLOW_KEYS", listed)
        with pytest.raises(Outage, match="RLHF_ALLOW_KEYS of the worker lacks MY_KEY@127.0.0.1"):
            ask(url, key_variable="MY_KEY")
    assert asked == []
    monkeypatch.setenv("RLHF_ALLOW_KEYS", "MY_KEY@api.example.org, MY_KEY@127.0.0.1")
    replies.append("10")
    assert ask(url, key_variable="MY_KEY") == [1.0] and asked[0][1] == "Bearer k"
    with pytest.raises(Outage, match=r"sent over https alone, and the address is http://api.example.org"):
        ask("http://api.example.org/v1", key_variable="MY_KEY")


def test_a_redirect_does_not_take_the_key_along(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "k")
    head = f"HTTP/1.1 302 Found\r\nLocation: {server[0]}/stolen\r\nContent-Length: 0\r\n\r\n".encode()
    with dripping(head) as url, pytest.raises(Outage, match="answered 302"):
        ask(url, key_variable="MY_KEY", retries=0)
    assert server[1] == []


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("no idea", "no number from 0"),
        ([{"text": "5"}], "expected a text"),
        (None, "expected a text"),
        ("11", "no number"),
        (400, "400"),
        ("<think>\nThere are 3", "has no number"),
    ],
)
def test_a_verdict_that_is_none_says_why(server, reply, message):
    server[2].append(reply)
    with pytest.raises(JudgeFailed, match=message):
        ask(server[0])


@pytest.mark.parametrize(("reply", "message"), [(503, "answered 503"), (401, "answered 401"), (404, "answered 404")])
def test_a_server_that_is_ill_or_refuses_the_key_is_an_outage(server, reply, message):
    server[2].append(reply)
    with pytest.raises(Outage, match=message):
        ask(server[0], retries=0)


def test_an_endpoint_that_is_not_there():
    with pytest.raises(Outage, match="cannot be reached"):
        ask("http://127.0.0.1:9/v1", retries=0)


@contextlib.contextmanager
def dripping(head):
    """The URL of a server that answers with `head`, and then with a blank every 20 ms."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip():
            connection = server.accept()[0]
            with connection, contextlib.suppress(OSError):
                connection.sendall(head)
                while not done.wait(0.02):
                    connection.sendall(b" ")

        done, thread = threading.Event(), threading.Thread(target=drip)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        done.set()
        thread.join()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX:"], ids=["body", "headers"])
def test_an_endpoint_that_sends_blanks_while_it_waits_is_an_outage_too(head):
    with dripping(head) as url, pytest.raises(Outage, match="no answer within 0.2 s"):
        ask(url, retries=0, timeout=0.2)


def test_a_key_does_not_go_through_a_proxy_in_the_clear(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    server[2].append("7")
    assert ask(server[0], retries=0) == [0.7]


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        *(("Score: 7/10", 0.7), ("**7** / 10", 0.7), ("I say 8.5 out of 10.", 0.85), ("3/5", None)),
        *((r"\boxed{7}/10", 0.7), ("Score: 8 (out of 10)", 0.8), ("[[7]]/10", 0.7), ("8 of 10", 0.8)),
        *(("2 on a scale of 1 to 10", None), ("3 out of a possible 10", None), ("7 (max: 10)", None)),
        *(("10", 1.0), ("1. Right.\n2. Brief.\n**10**", 1.0), ("10/10", 1.0), ("A 10 out of 10: a 10.", 1.0)),
        *(("It says 3 + 4 = 7.\n\nScore: 10", 1.0), ("1. Right.\nRating: [[10]]", 1.0), ("As 1 + 1: 3.", 0.3)),
        *(("<think>\n2 + 2 is 4</think>Score: 10", 1.0), ("Score: 7\n\n(scale: 0 to 10)", None)),
    ],
)
def test_a_number_of_so_many_counts_where_the_best_is_so_many(server, reply, value):
    server[2].append(reply)
    if value is not None:
        assert ask(server[0]) == [value]
        return
    with pytest.raises(JudgeFailed, match="the judge's reply ends with (no number from 0 to )?10"):
        ask(server[0])


def test_an_endpoint_that_stays_silent_is_an_outage_within_the_limit_of_the_call():
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Outage, match="within 0.1 s"):
        ask(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", retries=0, timeout=0.1)
    assert longest_seconds(timeout=10.0, retries=2) == 3 * 10.0 + 0.5 + 1.0 + 1.0

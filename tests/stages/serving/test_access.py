"""A server that others can reach has keys, and no client takes more of it than its bounds: size, number, time."""

import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

from rlhf.stages.serving.access import AccessError, is_loopback, keys_of, owner_of
from rlhf.stages.serving.app import Guard
from rlhf.stages.serving.server import Metrics
from rlhf.stages.serving.settings import ServeOptions
from tests.stages.serving.support import served, serving
from tests.stages.support import running
from tests.support import until

KEY, OTHER = "k" * 24, "another-key-of-a-server"
OPTIONS = ServeOptions(body_megabytes=20_000 / 2**20, requests=2, request_seconds=20.0)


@pytest.fixture(scope="module")
def guarded(live):
    with serving(served(live), OPTIONS, [KEY, OTHER]) as url:
        yield url


@pytest.fixture(scope="module")
def asked(guarded):
    with httpx.Client(base_url=guarded, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
        yield client


SAID = {"prompt": "ab", "max_tokens": 2, "temperature": 0}


@pytest.mark.parametrize(
    "header", ["", KEY, f"Basic {KEY}", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer \xff\xfe"]
)
def test_a_header_without_one_of_the_keys_opens_nothing(header):
    assert owner_of([KEY, OTHER], header.encode("latin-1")) is None


@pytest.mark.parametrize("headers", [{}, {"authorization": f"Bearer {KEY}x"}])
def test_without_a_key_nothing_is_answered_but_whether_it_lives(guarded, headers):
    fault = "this server does not take the key that was sent" if headers else "a key is needed"
    with httpx.Client(base_url=guarded, headers=headers, timeout=60) as client:
        for method, path in (
            ("POST", "/v1/completions"),
            ("POST", "/sessions/a/v1/completions"),
            ("POST", "/sessions/a/reward"),
            ("GET", "/sessions/a"),
            ("DELETE", "/sessions/a"),
            ("GET", "/metrics"),
            ("GET", "/openapi.json"),
            ("POST", "/health"),
        ):
            answer = client.request(method, path, json=SAID if method == "POST" else None)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
            assert answer.headers["www-authenticate"] == "Bearer"
            told = f"{fault}: send one of its keys as `Authorization: Bearer KEY`"
            assert answer.json()["error"]["message"] == told
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/ready").json() == {"status": "ready"}


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_each_key_opens(guarded, key):
    answer = httpx.post(f"{guarded}/v1/completions", json=SAID, headers={"authorization": f"bearer {key}"}, timeout=60)
    assert answer.status_code == 200, answer.text


def test_a_session_is_of_the_key_that_began_it(asked, guarded):
    other = {"authorization": f"Bearer {OTHER}"}
    assert asked.post("/sessions/mine/v1/completions", json=SAID).status_code == 200
    assert httpx.get(f"{guarded}/sessions/mine", headers=other).status_code == 404
    assert httpx.post(f"{guarded}/sessions/mine/reward", json={"reward": 1}, headers=other).status_code == 404
    assert httpx.delete(f"{guarded}/sessions/mine", headers=other).status_code == 404
    assert httpx.post(f"{guarded}/sessions/mine/v1/completions", json=SAID, headers=other).status_code == 200
    records = [httpx.get(f"{guarded}/sessions/mine", headers=h).json() for h in (other, asked.headers)]
    assert [len(record["turns"]) for record in records] == [1, 1] and records[1]["reward"] is None
    assert asked.delete("/sessions/mine").status_code == 200


def test_a_host_that_others_reach_needs_a_key(tmp_path):
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org", ""):
        with pytest.raises(AccessError, match="there is no key: set RLHF_API_KEY or --api-key-file"):
            keys_of(ServeOptions(host=host), {})
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert is_loopback(host) and not keys_of(ServeOptions(host=host), {})
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n\n {KEY} \n{OTHER}\n")
    keys = keys_of(ServeOptions(host="0.0.0.0", api_key_file=str(file)), {"RLHF_API_KEY": "of-the-environment"})
    for key in (KEY, OTHER, "of-the-environment"):
        assert owner_of(keys, f"Bearer {key}".encode()) == keys.index(key)
    assert owner_of(keys, b"Bearer # of the team") is None


@pytest.mark.parametrize(
    "text", ["", "# none\n", "short\n", "with spaces in it, so none\n", "sch\u00f6ner-als-ein-key\n"]
)
def test_a_file_without_a_usable_key_is_refused(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(AccessError, match="no key|cannot be used"):
        keys_of(ServeOptions(api_key_file=str(file)), {})
    with pytest.raises(AccessError, match="cannot be read"):
        keys_of(ServeOptions(api_key_file=str(tmp_path / "none")), {})


def test_without_a_key_a_page_of_a_browser_cannot_reach_it_by_a_name_of_its_own(url):
    """DNS rebinding: a name of the page's is pointed at this machine."""
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[evil]"):
        answer = httpx.post(f"{url}/v1/completions", json=SAID, headers={"host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host")
    for host in ("127.0.0.1", "localhost:8000", "[::1]:8000"):
        assert httpx.post(f"{url}/v1/completions", json=SAID, headers={"host": host}).status_code == 200
    # What a page may send without asking first is no JSON by its type.
    plain = httpx.post(f"{url}/v1/completions", content=json.dumps(SAID), headers={"content-type": "text/plain"})
    assert plain.status_code == 400


def test_a_large_body_is_refused_by_its_limit_told_or_not(asked, guarded):
    large = json.dumps(SAID | {"prompt": "a" * 30_000}).encode()
    for content in (large, (large[i : i + 1000] for i in range(0, len(large), 1000))):
        answer = asked.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert "20000 bytes" in answer.json()["error"]["message"]


def raw(url, *parts, pause=0.0, seconds=15.0):
    """All that the server sends until it closes the connection, for bytes that are sent part by part."""
    place, got = urlsplit(url), b""
    with socket.create_connection((place.hostname, place.port), timeout=seconds) as sock:
        for part in parts:
            try:
                sock.sendall(part.encode() if isinstance(part, str) else part)
            except OSError:
                break
            time.sleep(pause)
        try:
            while chunk := sock.recv(65536):
                got += chunk
        except ConnectionError:
            pass
    return got


def test_a_head_without_end_is_refused(guarded):
    lines = [f"x-{i}: {'a' * 1000}\r\n" for i in range(200)]
    answer = raw(guarded, "GET /health HTTP/1.1\r\n", *lines)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "bytes_",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET http://evil/health HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"CONNECT evil:443 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused_or_let_go(guarded, bytes_):
    answer = raw(guarded, bytes_)
    assert answer == b"" or answer.split()[1].startswith(b"4"), answer
    assert httpx.get(f"{guarded}/health").status_code == 200


def test_more_requests_than_allowed_are_told_to_come_again(asked, guarded):
    """Two are under way, which wait for the rest of their bodies."""
    place = urlsplit(guarded)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\ncontent-length: 50\r\n\r\n{{"
    slow = [socket.create_connection((place.hostname, place.port)) for _ in range(2)]
    for sock in slow:
        sock.sendall(head.encode())
    answers = []
    until(lambda: answers.append(asked.post("/v1/completions", json=SAID)) or answers[-1].status_code == 429, 60)
    answer = answers[-1]
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "too_many_requests"
    ready = httpx.get(f"{guarded}/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
    assert httpx.get(f"{guarded}/health").status_code == 200
    for sock in slow:
        sock.close()
    until(lambda: asked.post("/v1/completions", json=SAID).status_code == 200, 60)


def test_a_client_that_reads_nothing_is_let_go():
    """Otherwise its answer takes memory, and its request counts, forever."""

    class Large:
        routes = ()

        async def __call__(self, scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})

    guard = Guard(Large(), Metrics(), ServeOptions(request_seconds=0.5))
    with running(guard) as url, socket.create_connection(("127.0.0.1", urlsplit(url).port)) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 0\r\n\r\n")
        for busy in (1, 0):
            until(lambda busy=busy: guard.busy == busy, 20)


def test_metrics_are_prometheus_text_and_count_what_was_asked(asked):
    asked.post("/v1/completions", json=SAID)
    asked.post("/v1/completions", json={"prompt": 1})
    asked.get("/sessions/nobody")
    asked.get("/a/path/of/an/attacker?and=more")
    page = asked.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    parser = pytest.importorskip("prometheus_client.parser")
    found = {
        (s.name, s.labels.get("route"), s.labels.get("status")): s.value
        for family in parser.text_string_to_metric_families(page.text)
        for s in family.samples
    }
    assert found["rlhf_serve_requests_total", "/v1/completions", "200"] >= 1
    assert found["rlhf_serve_requests_total", "/v1/completions", "400"] >= 1
    assert found["rlhf_serve_requests_total", "/sessions/{name}", "404"] >= 1
    assert found["rlhf_serve_requests_total", "other", "404"] >= 1
    assert found["rlhf_serve_completion_tokens_total", None, None] >= 1
    assert found["rlhf_serve_engine_up", None, None] == 1
    assert found["rlhf_serve_requests_in_flight", None, None] == 0
    assert found["rlhf_serve_request_seconds_count", None, None] >= 4

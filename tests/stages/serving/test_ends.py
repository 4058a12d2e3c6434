"""Requests, engines and servers whose time is over end, each with its reason, and leave nothing that waits."""

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from rlhf.stages.serving import app as routes
from rlhf.stages.serving import web
from rlhf.stages.serving.app import Guard, make_app
from rlhf.stages.serving.programs import endpoint
from rlhf.stages.serving.serve import end_with, main
from rlhf.stages.serving.server import Metrics, Server
from rlhf.stages.serving.settings import PolicyPlace, Serve, ServeOptions
from rlhf.stages.serving.web import Web
from rlhf.tuning.rollout.engine.live import EngineStopped
from rlhf.tuning.rollout.requests import Request
from tests.stages.serving.support import CONTEXT, STOPS, TOKENIZER, living, served, serving
from tests.support import ROOT, free_port, until

pytestmark = pytest.mark.slow

SAID = {"prompt": "ab", "max_tokens": 2, "temperature": 0}


LONG = SAID | {"max_tokens": 190, "n": 64, "ignore_eos": True, "temperature": 1}


def test_an_answer_that_takes_too_long_ends_with_its_reason(live):
    with serving(served(live), ServeOptions(request_seconds=0.3)) as url:
        answer = httpx.post(f"{url}/v1/completions", json=LONG, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "time_limit")
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=60) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "time_limit"
        # Its samples have left the engine.
        until(lambda: not live.open, 30)


@contextlib.contextmanager
def hanging(live):
    """A step that takes until the returned event, as on a device that has hung; what the call for it raises."""
    going_on, raised = threading.Event(), []

    def hang():
        try:
            live.look(lambda *_: going_on.wait(60))
        except EngineStopped as e:
            raised.append(e)

    thread = threading.Thread(target=hang)
    thread.start()
    try:
        until(lambda: live.step_seconds > 0.3)
        yield going_on, raised
    finally:
        going_on.set()
        thread.join(20)


def test_a_request_whose_time_is_over_before_the_engine_has_taken_it_leaves_it_nothing(live):
    made = []

    class Watched(Server):
        def submit(self, *arguments):
            made.append(super().submit(*arguments))
            return made[-1]

    watched = Watched(live, TOKENIZER, "tiny", STOPS, CONTEXT)
    with serving(watched, ServeOptions(request_seconds=0.3)) as url:
        with hanging(live):
            answer = httpx.post(f"{url}/v1/completions", json=LONG, timeout=60)
            assert (answer.status_code, answer.json()["error"]["code"], made) == (504, "time_limit", [])
        until(lambda: made, 30)
        assert {done.stop for done in made[0][0].result()} == {"cancelled"}


def test_an_engine_that_hangs_keeps_nobody_who_closes_it(params):
    with living(params) as live:
        stream = live.submit(Request([5, 6], 150, seed=1))
        with hanging(live) as (_, raised):
            live.close(seconds=0.1)
            with pytest.raises(EngineStopped, match="closed"):
                stream.result()
            until(lambda: raised, 20)


def test_health_is_that_of_the_engine(params, monkeypatch):
    monkeypatch.setattr(routes, "STALLED_SECONDS", 0.2)
    with living(params) as live, serving(served(live)) as url:

        def unwell(said):
            for path, status in (("health", "failed"), ("ready", "not ready")):
                answer = httpx.get(f"{url}/{path}")
                assert (answer.status_code, answer.json()["status"]) == (503, status)
                assert said in answer.json()["error"]
            assert "rlhf_serve_engine_up 0.0" in httpx.get(f"{url}/metrics").text

        with hanging(live):
            unwell("has hung for")
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        live.close()
        unwell("EngineStopped: closed")


def test_a_server_whose_engine_has_stopped_for_good_ends_for_its_supervisor(params):
    with living(params) as live:
        web = Web(make_app(served(live)), "127.0.0.1", 0)
        watch = threading.Thread(target=end_with, args=(live, web, 0.01))
        watch.start()
        assert not web.should_exit
    watch.join(20)
    assert web.should_exit


def test_an_address_that_is_taken_ends_the_server_before_it_loads_a_policy(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ServeOptions(port=taken.getsockname()[1])
        policy = PolicyPlace(store="none", stage="sft", key="k", digest="d", base="b")
        monkeypatch.setattr("sys.argv", ["serve", Serve(policy=policy, options=options, name="x").model_dump_json()])
        with pytest.raises(SystemExit, match="cannot listen at .*: Address already in use"):
            main()


def test_a_long_prompt_does_not_stop_the_streams_of_others(live, monkeypatch):
    """It is tokenized in a thread: the loop answers others meanwhile."""
    server, threads = served(live), []
    real = server._prompt_ids

    def prompt_ids(*prompt, **how):
        threads.append(threading.current_thread().name)
        return real(*prompt, **how)

    monkeypatch.setattr(server, "_prompt_ids", prompt_ids)
    with serving(server) as url:
        for place in ("", "/sessions/a"):
            assert httpx.post(f"{url}{place}/v1/completions", json=SAID, timeout=60).status_code == 200
    assert threads and all(name.startswith("reader") for name in threads)


class App:
    """An application without routes."""

    routes = ()

    def __init__(self, answer):
        self.answer = answer

    async def __call__(self, scope, receive, send):
        await self.answer(receive)


SCOPE = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": [(b"host", b"127.0.0.1")]}


async def send(message):
    raise AssertionError(message)


def test_a_client_that_left_has_status_0_and_its_request_does_not_count():
    async def receive():
        return {"type": "http.disconnect"}

    async def read(receive):
        assert await receive() == {"type": "http.disconnect"}

    metrics = Metrics()
    guard = Guard(App(read), metrics)
    asyncio.run(guard(dict(SCOPE), receive, send))
    assert metrics.registry.get_sample_value("rlhf_serve_requests_total", {"route": "other", "status": "0"}) == 1
    assert guard.busy == 0


def test_a_timeout_of_the_application_is_not_reported_as_the_limit_of_the_request():
    async def late(receive):
        raise TimeoutError("of its own")

    # As any other failure: the server answers 500, and its log has the place.
    with pytest.raises(TimeoutError, match="of its own"):
        asyncio.run(Guard(App(late), Metrics())(dict(SCOPE), None, send))


FLOOD = """
import socket, sys
clients, first = [], sys.argv[2].encode().decode("unicode_escape").encode()
for _ in range(600):
    clients.append(client := socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5))
    if first:
        client.sendall(first)
        client.recv(4096)
        # The beginning of a second head, which stops the timer of an idle connection.
        client.sendall(b"G")
print("opened", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("first", ["", "GET /health HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n"], ids=["none", "one"])
def test_silent_connections_leave_files_to_the_process_and_are_dropped(live, monkeypatch, first):
    monkeypatch.setattr(web, "HEAD_SECONDS", 3.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving(served(live)) as url:
        command = [sys.executable, "-c", FLOOD, url.rpartition(":")[2], first]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flood:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
                assert flood.stdout.readline() == "opened\n"
                with contextlib.ExitStack() as opened:
                    for _ in range(100):
                        opened.enter_context(open(os.devnull))
                    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
                until(lambda: len(web_connections(url)) < 10)
                assert httpx.get(f"{url}/health", timeout=60).status_code == 200
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                flood.stdin.close()


def web_connections(url):
    """The established connections of this process's server."""
    port = int(url.rpartition(":")[2])
    found = psutil.Process().net_connections("tcp")
    return [one for one in found if one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED]


def test_a_server_has_all_files_that_the_system_gives(live):
    """256 programs of episodes with their connections have more than the usual 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
        with endpoint(served(live), "a key"):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def ask_twice(url, key="none"):
    """Of two requests the first is in the step, and the second waits to be taken."""

    def ask():
        with contextlib.suppress(httpx.HTTPError):
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 5}
            httpx.post(f"{url}/v1/completions", json=body, timeout=120, headers={"authorization": f"Bearer {key}"})

    for _ in range(2):
        threading.Thread(target=ask, daemon=True).start()


def in_flight(url):
    with contextlib.suppress(httpx.HTTPError):
        found = re.search(r"requests_in_flight (\d+)", httpx.get(f"{url}/metrics").text)
        return int(found[1]) if found else 0
    return -1


@pytest.fixture
def start():
    """Starts a server with these arguments, and ends it behind the test."""
    made = []

    def begin(*arguments):
        command = [sys.executable, "-m", "tests.stages.serving.hanging_server", *arguments]
        made.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        return made[-1]

    yield begin
    for process in made:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_server_whose_engine_hangs(start, number):
    port = free_port()
    process, url = start(str(port)), f"http://127.0.0.1:{port}"
    until(lambda: in_flight(url) == 0)
    ask_twice(url)
    until(lambda: in_flight(url) == 2)
    # Into the step, and behind it.
    time.sleep(1)
    process.send_signal(number)
    said, _ = process.communicate(timeout=45)
    # To its last line, and not by the signal.
    assert process.returncode == 0 and said.startswith("[")


@pytest.mark.slow
def test_a_request_that_is_under_way_at_sigterm_gets_its_answer(start):
    port = free_port()
    process, url = start(str(port), "answers"), f"http://127.0.0.1:{port}"
    answers = []

    def ask():
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 150, "n": 32, "ignore_eos": True}
        answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=120))

    until(lambda: in_flight(url) == 0)
    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: in_flight(url) == 1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    asking.join(60)
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 32 * 150
    assert process.returncode == 0 and said.startswith("[")


@pytest.mark.slow
def test_the_server_of_agents_ends_although_the_engine_hangs(start):
    process = start("agents")
    ask_twice(process.stdout.readline().strip(), "k" * 32)
    said, _ = process.communicate(timeout=60)
    assert said.splitlines()[0] == "closed" and process.returncode == 0

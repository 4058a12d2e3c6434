"""A server ends within seconds although the engine's step hangs and requests wait for it."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.support import ROOT, free_port, until


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
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
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

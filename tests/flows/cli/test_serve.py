"""`rlhf serve` as people start it: a process of its own, asked over HTTP."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support import RLHF, free_port, hears_ctrl_c, until


@contextmanager
def _served(store: Path, log: Path, *options: str) -> Iterator[httpx.Client]:
    """A client of `rlhf serve`, which must end in silence at Ctrl-C."""
    port = str(free_port())
    command = [RLHF, "serve", "--store", str(store), "--port", port, *options]
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, preexec_fn=hears_ctrl_c)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            until(lambda: answers(server, client, log), 300)
            yield client
        server.send_signal(signal.SIGINT)
        server.wait(60)
        assert "Traceback" not in log.read_text()
    finally:
        server.kill()
        server.wait()


def answers(server: subprocess.Popen[bytes], client: httpx.Client, log: Path) -> bool:
    assert server.poll() is None, log.read_text()
    try:
        return client.get("/health").raise_for_status().is_success
    except httpx.TransportError:
        return False


def test_only_a_name_of_the_registry_is_followed(rlhf_here, tmp_path):
    done = rlhf_here("serve", "my-run", "--follow", "--store", tmp_path, code=2)
    assert "--follow needs a promoted name; my-run has no entry" in done.stderr


@pytest.mark.slow
def test_a_host_that_others_reach_is_not_served_without_a_key(tmp_path):
    for options in (("--host", "0.0.0.0"), ("--api-key-file", str(tmp_path / "none"))):
        done = subprocess.run([RLHF, "serve", "--store", str(tmp_path), *options], capture_output=True, text=True)
        assert done.returncode == 2
        assert "set RLHF_API_KEY" in done.stderr or "cannot be read" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--cache", "paged")])
def test_the_command_serves_the_policy_of_a_run(smoke_store, tmp_path, options):
    with _served(smoke_store, tmp_path / "log", *options) as client:
        [model] = client.get("/v1/models").raise_for_status().json()["data"]
        asked = {"model": model["id"], "prompt": "2 + 2 = ", "max_tokens": 4, "logprobs": 1, "temperature": 0}
        [choice] = client.post("/v1/completions", json=asked).raise_for_status().json()["choices"]
        assert 1 <= len(choice["logprobs"]["token_logprobs"]) <= 4
        messages = [{"role": "user", "content": "2 + 2 = ?"}]
        asked = {"model": "policy", "messages": messages, "max_tokens": 4, "stream": True}
        text = client.post("/v1/chat/completions", json=asked).raise_for_status().text
        assert text.rstrip().endswith("data: [DONE]")
        assert client.get("/health").status_code == 200

"""The private Prefect server answers for as long as the command needs it, also after its death."""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from urllib.request import proxy_bypass

import psutil
import pytest

from rlhf.flows.orchestration.server import START_SECONDS, PrivateServer, ServerFailed, one_at_a_time, reach_directly
from rlhf.stages.store.artifacts import Store
from tests.flows.prefect_server import PROJECT, PYTHONPATH, prefect_server
from tests.support import RLHF


def servers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "rlhf.flows.orchestration.server" in child.cmdline()]


direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def healthy(url: str) -> bool:
    with direct.open(f"{url}/health", timeout=120) as answer:
        return bool(answer.status == 200)


@pytest.mark.slow
def test_a_private_server_that_is_killed_is_started_again_at_its_address(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    # Nobody is there: what asked it for this machine would get no answer.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server = PrivateServer()
    try:
        server.wait()
        (first,) = servers()
        os.kill(first.pid, signal.SIGKILL)
        first.wait(timeout=10)
        # No try of its own: the request waits until somebody answers.
        assert healthy(server.url)
        (second,) = servers()
        assert second.pid != first.pid
    finally:
        server.stop()
    assert servers() == []
    with pytest.raises(urllib.error.URLError, match="refused"):
        healthy(server.url)


AS_ANOTHER_USER = """
import encodings.idna, json, os, sys, urllib.error, urllib.request
# Here, when all is imported: another user may not read this Python.
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
url, pid = sys.argv[1:]
headers = {"Origin": "http://evil.example", "content-type": "application/json"}
ask = urllib.request.Request(url, b'{"include_secrets": true}', headers)
try:
    answer = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(ask, timeout=60)
except urllib.error.HTTPError as error:
    answer = error
try:
    environment = open(f"/proc/{pid}/environ").read()
except PermissionError:
    environment = ""
print(json.dumps([answer.status, answer.headers.get("access-control-allow-origin"), "AUTH" in environment]))
"""


def test_a_private_server_starts_with_a_key_and_without_other_origins():
    private = PrivateServer()
    try:
        given = servers()[0].environ()
    finally:
        private.stop()
    assert given["PREFECT_SERVER_API_AUTH_STRING"] == private.auth
    assert given["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"] == private.url.removesuffix("/api")


@pytest.mark.slow
def test_other_users_and_web_pages_get_nothing_from_a_private_server(tmp_path, monkeypatch, prefect_database):
    """What `rlhf run` starts serves the secrets that its user keeps in Prefect."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    if (kept := prefect_database / "prefect.db").exists():
        shutil.copy(kept, tmp_path)
    private = PrivateServer()
    try:
        private.wait()
        documents = f"{private.url}/block_documents/filter"
        command = [sys.executable, "-I", "-c", AS_ANOTHER_USER, documents, str(servers()[0].pid)]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/")
        assert json.loads(done.stdout) == [401, None, os.geteuid() != 0], done.stderr
        token = base64.b64encode(private.auth.encode()).decode()
        own = urllib.request.Request(
            documents, b"{}", {"Authorization": f"Basic {token}", "content-type": "application/json"}
        )
        with direct.open(own, timeout=60) as answer:
            assert json.load(answer) == []
    finally:
        private.stop()


def test_a_lock_that_another_process_holds_is_told_with_its_holder(tmp_path):
    path = str(tmp_path / "rlhf-server.lock")
    code = "import sys; from rlhf.flows.orchestration.server import one_at_a_time\n"
    code += "with one_at_a_time(sys.argv[1]): print('held', flush=True)"
    with one_at_a_time(path):
        command = [sys.executable, "-c", code, path]
        waiting = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)
        line = waiting.stdout.readline()
        assert path in line and f"process {os.getpid()} holds" in line
    assert waiting.stdout.read() == "held\n" and waiting.wait(timeout=60) == 0


@pytest.mark.slow
def test_a_private_server_that_dies_at_its_start_is_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("a file where the folder should be")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    server = PrivateServer()
    began = time.monotonic()
    with pytest.raises(
        ServerFailed, match="(?s)exited with status 1:\n.*Error: .*\nadd --no-prefect to run without it$"
    ):
        server.wait()
    assert time.monotonic() - began < START_SECONDS
    assert servers() == []


@pytest.mark.parametrize("given", [{}, {"NO_PROXY": "a.site, .b"}, {"no_proxy": "a.site,.b"}, {"NO_PROXY": "*"}])
def test_requests_to_this_machine_take_no_proxy_and_others_as_before(monkeypatch, given):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = {host: bool(proxy_bypass(host)) for host in ("a.site", "x.b", "c.site")}
    reach_directly()
    reach_directly()
    assert {host: bool(proxy_bypass(host)) for host in before} == before and proxy_bypass("127.0.0.1")
    # Of two names for one list httpx too reads one.
    assert os.environ.get("NO_PROXY") == os.environ.get("no_proxy") or given == {"NO_PROXY": "*"}


KILLING = """
import os, signal

def lines():
    os.kill(int(os.environ["OF_THE_TEST"]), signal.SIGKILL)
    raise ValueError("the error of the stage")
    yield
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_error_of_a_run_is_told_where_its_server_is_gone(tmp_path):
    with prefect_server(tmp_path) as prefect:
        (pid,) = [c.pid for c in psutil.Process().children() if f"{prefect.port}" in " ".join(c.cmdline())]
        (tmp_path / "killing_source.py").write_text(KILLING)
        env = prefect.env | {"OF_THE_TEST": str(pid), "PYTHONPATH": f"{PYTHONPATH}{os.pathsep}{tmp_path}"}
        sets = [f"store={tmp_path / 'store'}", "data.source=killing_source:lines"]
        command = [RLHF, "run", "smoke", *(word for item in sets for word in ("--set", item))]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "the error of the stage" in done.stderr, done.stdout + done.stderr
    assert Store(str(tmp_path / "store")).names("runs")

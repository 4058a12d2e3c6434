"""Engines over HTTP whose servers run in processes of their own: started, lost, started again, and gone at the end."""

import os
import signal
import sys

import psutil
import pytest

from rlhf.tuning.rollout.servers.child import Child
from rlhf.tuning.rollout.servers.kinds import KINDS
from rlhf.tuning.rollout.servers.protocol import ServerLost
from rlhf.tuning.rollout.servers.server import RemoteServer
from tests.stages.sampling.support import GREEDY, remote, requests_of, run, same
from tests.support import python, until


@pytest.fixture
def child(tmp_path):
    def command(folder, port):
        words = ["-m", "tests.stages.sampling.http_server", "--pids", str(tmp_path / "pids-0")]
        return [sys.executable, *words, *KINDS["vllm"].arguments(folder, port, "float32", 256, False)]

    made = Child(command, {}, tmp_path / "server.log")
    yield made
    made.end()


def pids(tmp_path, name="pids-0"):
    return [int(line) for line in (tmp_path / name).read_text().split()]


@pytest.mark.slow
def test_a_started_server_that_is_killed_is_started_again_and_nothing_is_lost(child, tmp_path, policy, native):

    engine = remote(RemoteServer(child=child), concurrency=2)
    engine.load(policy("first"))
    # Long samples, so that there is a middle.
    requests = [*requests_of(20, temperature=1.0, samples=4, max_tokens=120), *GREEDY]
    stream = engine.run(requests)
    found = dict([next(stream), next(stream)])
    os.kill(pids(tmp_path)[0], signal.SIGKILL)
    found |= dict(stream)
    assert set(found) == set(range(32))
    same([found[20 + i] for i in range(12)], native["first"])
    assert child.starts == 2
    assert any("its prompts go to the next free server" in line for line in engine.lines)
    # The next policy needs no start, unless the endpoints are not to be used.
    engine.load(policy("second"))
    same(run(engine, GREEDY), native["second"])
    assert child.starts == 2
    again = remote(*engine._servers, sync="restart")
    again.load(policy("first"))
    same(run(again, GREEDY), native["first"])
    assert child.starts == 3
    child.end()
    assert not any(psutil.pid_exists(p) for p in pids(tmp_path))


@pytest.mark.slow
def test_the_others_take_over_from_a_lost_server_and_its_owner_keeps_nothing(
    child, tmp_path, folders, url, policy, native
):

    place = child.start(folders["first"])
    lost = RemoteServer(place)
    lost.wait(120)
    engine = remote(lost, RemoteServer(url), concurrency=1, wait_seconds=0.5)
    engine.load(policy("first"))
    stream = engine.run([*requests_of(20, samples=4, max_tokens=100), *GREEDY])
    found = dict([next(stream)])
    os.kill(pids(tmp_path)[0], signal.SIGKILL)
    found |= dict(stream)
    assert set(found) == set(range(32))
    same([found[20 + i] for i in range(12)], native["first"])
    assert any("a server is given up" in line for line in engine.lines)


KEPT = """
import sys, time
from pathlib import Path
from rlhf.tuning.rollout.servers.child import Child
script = "import os, signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN); "
script += "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']); "
script += "open(sys.argv[1], 'w').write(f'{os.getpid()} {p.pid}'); time.sleep(100)"
child = Child(lambda folder, port: [sys.executable, "-c", script, sys.argv[1]], {}, Path(sys.argv[1] + ".log"))
child.start(None)
time.sleep(100)
"""


@pytest.mark.parametrize("victim", ["owner", pytest.param("server", marks=pytest.mark.slow)])
def test_a_kill_leaves_nothing_behind(tmp_path, victim):
    """Neither the end of the owner nor that of the server leaves a process, though the server ignores SIGTERM."""
    owner = python(KEPT, tmp_path / "pids")
    until(lambda: (tmp_path / "pids").exists() and len(pids(tmp_path, "pids")) == 2, 30)
    server, below = map(psutil.Process, pids(tmp_path, "pids"))
    if victim == "owner":
        owner.kill()
    else:
        server.kill()
    assert psutil.wait_procs([server, below], timeout=15)[1] == []
    owner.kill()
    owner.communicate()


def test_a_command_that_ends_at_once_is_told_with_its_log(tmp_path, policy):
    def command(folder, port):
        return [sys.executable, "-c", "import sys; sys.exit('no such model')"]

    server = RemoteServer(child=Child(command, {}, tmp_path / "log"))
    with pytest.raises(ServerLost, match=r"(?s)is gone: it ended with status 1.*no such model"):
        remote(server).load(policy("first"))

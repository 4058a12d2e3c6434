"""Engines over HTTP whose servers run in processes of their own: started, lost, started again, and gone at the end."""

import contextlib
import os
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from fsspec.implementations.local import LocalFileSystem

from rlhf.stages.sampling import servers
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


def test_a_command_that_ends_at_once_is_told_with_its_log(tmp_path, policy, capsys):
    def command(folder, port):
        return [
            sys.executable,
            "-c",
            "import sys; print('the cause', *range(30), sep='\\n'); sys.exit('no such model')",
        ]

    server = RemoteServer(child=Child(command, {}, tmp_path / "log"))
    with pytest.raises(ServerLost, match=r"(?s)is gone: it ended with status 1.*no such model") as lost:
        remote(server).load(policy("first"))
    # The worker's log outlives the server's.
    assert "the cause" not in str(lost.value) and "\nthe cause\n" in capsys.readouterr().out
    # Once for each start, and a full disk of the worker's log is no reason to lose the message.
    assert "no such model" in server.child.obituary() and capsys.readouterr().out == ""
    server.child.starts += 1
    with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
        assert "no such model" in server.child.obituary()
        # What the stream still holds.
        with contextlib.suppress(OSError):
            full.close()


def test_servers_end_together_and_take_their_weights_along(tmp_path, monkeypatch):
    def child(number):
        return Mock(leave=lambda: calls.append(f"leave {number}"), end=lambda: calls.append(f"end {number}"))

    calls: list[str] = []
    (tmp_path / "weights").mkdir()
    monkeypatch.setattr(servers, "_started", {"one": (0, [Mock(child=child(i)) for i in range(2)])})
    monkeypatch.setattr(servers, "_places", {str(tmp_path / "weights")})
    servers.end_all()
    assert calls == ["leave 0", "leave 1", "end 0", "end 1"] and not (tmp_path / "weights").exists()


def test_weights_that_dead_workers_have_left_are_removed(tmp_path, monkeypatch):
    own = Path(servers._own(str(tmp_path))).name
    dead, foreign, other = (f"{own.rpartition('-')[0]}-{2**22 + 1}", f"{own.rpartition('-')[0]}-{2**22 + 2}", "pod-1-7")
    for name in (dead, foreign, other):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "weights").write_text("w")
    remove = LocalFileSystem.rm

    def refuse(self, path, recursive):
        if path.endswith(foreign):
            raise PermissionError(path)
        remove(self, path, recursive=recursive)

    monkeypatch.setattr(LocalFileSystem, "rm", refuse)
    servers._own(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([other, foreign])

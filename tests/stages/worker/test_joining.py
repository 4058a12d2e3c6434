"""A rank outlives its lead and its own process: those that were in the gang go on, others end after their wait."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stages.worker import channel, joining, places
from stages.worker.rank import Member, _status_after

TOKEN = "0123456789abcdef"


@contextlib.contextmanager
def rank(port, wait):
    """The process of `rlhf join`."""
    command = [Path(sys.executable).with_name("rlhf"), "join", f"127.0.0.1:{port}", "--rank", "1"]
    environment = {**os.environ, "RLHF_GANG_TOKEN": TOKEN, "RLHF_GANG_WAIT": str(wait)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def come(server):
    """The channel and the hello of the next rank."""
    while True:
        with contextlib.suppress(OSError, ValueError):
            return channel.welcome(server.accept()[0], TOKEN)


def until_killed(server, begun, wait):
    """Has a rank in the gang for longer than it would wait, and kills it."""
    opened, hello = come(server)
    opened.send({"welcome": {"ranks": 2, "coordinator": "127.0.0.1:1", "silence": 60.0}})
    assert "beat" in opened.receive(30)
    time.sleep(max(1.0, begun + wait + 1 - time.monotonic()))
    os.kill(hello["pid"], signal.SIGKILL)
    opened.close()


def test_a_rank_that_is_killed_in_the_gang_joins_again():
    with channel.listen("127.0.0.1", 0) as server:
        server.settimeout(60)
        begun, wait = time.monotonic(), 4.0
        with rank(server.getsockname()[1], wait) as process:
            until_killed(server, begun, wait)
            opened, _ = come(server)
            opened.send({"bye": "end"})
            _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "rank 1 was in the gang, and its process was ended by signal SIGKILL" in said
    assert "has not got into the gang" not in said


def test_a_rank_that_never_got_in_says_how_its_last_process_ended(monkeypatch):
    told = []
    monkeypatch.setenv(places.WAIT, "0.5")
    # Killed as it starts, as by a host without memory.
    monkeypatch.setattr(joining.interpreter, "_START", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert joining.stay("127.0.0.1:1", 1, told.append) == joining.GONE
    assert told[-1].endswith("for 0.5 s; its last process was ended by signal SIGKILL")


def test_a_rank_waits_for_its_welcome_no_longer_than_it_is_told():
    with channel.listen("127.0.0.1", 0) as server:
        kept = []
        lead = threading.Thread(target=lambda: kept.append(come(server)))
        lead.start()
        opened = channel.connect(*server.getsockname(), TOKEN, {"rank": 1}, wait=10)
        lead.join()
        with pytest.raises(TimeoutError) as silent:
            Member(1, opened, 0.3)
    assert _status_after(silent.value) == joining.AGAIN


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (channel.NoLead("no lead at host:1 for 600 s"), joining.GONE),
        (OSError(errno.ETIMEDOUT, "Connection timed out"), joining.AGAIN),
        (OSError(errno.ECONNRESET, "Connection reset by peer"), joining.LATER),
        (EOFError("the lead has ended"), joining.LATER),
        (channel.Refused("rank 1 is there already", for_good=False), joining.LATER),
        (channel.Refused("another token"), joining.REFUSED),
    ],
)
def test_a_connection_that_was_lost_is_not_that_no_lead_answers(error, status):
    assert _status_after(error) == status

"""A worker that makes no progress, takes too long or reads nothing is ended, with its stacks in the log."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rlhf.stages.worker import process
from rlhf.stages.worker.client import Worker, WorkerDied
from rlhf.stages.worker.protocol import Heartbeat, parse_event
from tests.stages.worker.support import ignore, request, workers_are


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """A worker that lives, tells that it compiles and makes nothing."""
    monkeypatch.setenv("COMPILES", "always")
    workers_are(monkeypatch, "hanging")
    worker = Worker(tmp_path / "worker.log")
    yield worker
    worker.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiles", "cause"),
    [
        ("", r"made no progress for 1 s \(`limits.stall_seconds`\)"),
        ("always", r"compiled for 3 s \(3 times `limits.stall_seconds`\)"),
        ("in turn", r"made no progress for 1 s \(`limits.stall_seconds`\)"),
    ],
)
def test_a_worker_that_lives_and_does_not_move_is_ended_with_its_stacks_in_the_log(
    tmp_path, monkeypatch, hanging, compiles, cause
):
    monkeypatch.setenv("COMPILES", compiles)
    hanging.stall_seconds = 1.0
    with pytest.raises(WorkerDied, match=f"{cause}, and was ended in stage base"):
        hanging.run(request(tmp_path), ignore)
    assert "in waits_for_ever" in hanging.log.read_text()
    assert not psutil.pid_exists(hanging.pid)


@pytest.mark.slow
def test_a_stage_that_takes_too_long_ends_its_worker_with_the_stacks_in_its_log(tmp_path, hanging):
    def limited(event):
        # From its first sign of life on: how long a start takes is the machine's.
        hanging.stage_seconds = 0.25

    with pytest.raises(WorkerDied, match=r"took longer than 0.25 s \(`limits.stage_seconds`\), and was ended"):
        hanging.run(request(tmp_path), limited)
    assert "in waits_for_ever" in hanging.log.read_text()
    assert not psutil.pid_exists(hanging.pid)


@pytest.mark.slow
def test_what_a_check_of_the_time_raises_ends_the_worker_and_is_no_death_of_it(tmp_path, hanging):
    events = []

    def check():
        if events:
            raise TimeoutError("enough")

    with pytest.raises(TimeoutError, match="enough"):
        hanging.run(request(tmp_path), events.append, check)
    assert "in waits_for_ever" in hanging.log.read_text()
    assert not psutil.pid_exists(hanging.pid)


def test_a_request_that_the_worker_does_not_read_is_no_wait_for_ever(tmp_path, monkeypatch, hanging):
    monkeypatch.setenv("DEAF", "1")
    monkeypatch.setenv("COMPILES", "")
    hanging.stall_seconds = 1.0
    # More than a pipe holds.
    with pytest.raises(WorkerDied, match="made no progress for 1 s"):
        hanging.run(request(tmp_path, source="x" * 2**21), ignore)
    assert not psutil.pid_exists(hanging.pid)


STOPPED = """
import sys
from pathlib import Path
import pytest
from rlhf.stages.worker import client
from tests.stages.worker.support import ignore, request, workers_are

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    workers_are(pytest.MonkeyPatch(), "hanging")
    client.LONGEST_BEAT_SECONDS = 0.5
    next_event = client.Worker._next_event
    def told(self):
        event = next_event(self)
        # Once it has started, which takes longer.
        client.SILENCE_SECONDS = 3.0
        print(event, flush=True)
        return event
    client.Worker._next_event = told
    print(client.Worker(folder / "worker.log", stall_seconds=3.0).run(request(folder), ignore), flush=True)
"""


@pytest.mark.slow
def test_time_in_which_parent_and_worker_were_stopped_is_no_silence(tmp_path):
    """As by Ctrl-Z, which stops the whole foreground group, and `fg`."""
    command = [sys.executable, "-c", STOPPED, str(tmp_path)]
    environment = os.environ | {"BEATS": "10"}
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None and parent.stdout.readline() == "Heartbeat(compiling=False)\n"
    os.killpg(parent.pid, signal.SIGSTOP)
    time.sleep(4.0)
    os.killpg(parent.pid, signal.SIGCONT)
    assert parent.communicate()[0].splitlines()[-1] == "{}"
    assert parent.returncode == 0


def test_beats_end_in_silence_with_the_pipe_that_they_are_written_to(monkeypatch):
    """A run that ends closes it a moment before its worker has left: that is nothing for the log."""
    monkeypatch.setattr(process, "HEARTBEAT_SECONDS", 0.0)
    read, write = os.pipe()
    told, seen = [], []

    def compiling():
        if len(told) == 2:
            seen.extend(parse_event(line) for line in os.read(read, 10_000).splitlines())
            os.close(read)
        told.append(len(told) == 1)
        return told[-1]

    process.heartbeat(process.Events(os.fdopen(write, "w")), compiling)
    assert told == [False, True, False] and seen == [Heartbeat(False), Heartbeat(True)]

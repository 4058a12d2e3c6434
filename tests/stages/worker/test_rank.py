"""A rank that cannot go on ends, and its lead names it in seconds; where its lead is killed it ends in any state."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from stages.worker import joining
from tests.support import python

LEAD = """
import dataclasses, os, sys
from stages.worker.gang import Gang
from stages.worker.places import Place
from stages.worker.protocol import Request

@dataclasses.dataclass(frozen=True)
class Later(Request):
    hours: int = 3

gang = Gang(
    Place(2, 0, "127.0.0.1", 0, "0123456789abcdef", True, silence=60.0, wait=60.0),
    lambda what: print("lost:", what, flush=True),
    print,
    print,
)
gang.start()
print(*(child.pid for child in gang._children.values()), flush=True)
"""
REFUSED = """
try:
    gang.ask(Later("base", "k" * 64, {}, {}, {}, 7, sys.argv[1], "test"), [])
except RuntimeError as e:
    print(e, flush=True)
gang._tell({"run": {}, "request": 1})
"""
WAITS = """
import time
time.sleep(120)
"""


@contextlib.contextmanager
def lead(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The lead of two ranks, which is not left behind; nor is the other, but where a test stops it."""
    with python(LEAD + code, *arguments) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_rank_that_fails_outside_a_stage_is_told_by_name_and_at_once(tmp_path) -> None:
    """JAX's own end of a process would wait for the other ranks for five minutes."""
    with lead(REFUSED + WAITS, tmp_path) as process:
        out, log = process.communicate(timeout=60)
    started, refused, lost = out.splitlines()
    assert f"rank 1 (pid {started} on " in refused and "refuses base: " in refused
    assert "requests of the lead have `hours`, which this rank's version does not know" in refused
    assert lost.startswith(f"lost: lost rank 1 (pid {started} on ") and "of 2, which exited with status 1," in lost
    assert (process.returncode, "KeyError: 'kept'" in log) == (1, True), log


def test_a_lead_that_ends_waits_for_no_rank() -> None:
    """JAX's own end of a process would, and a rank of a broken gang is still at work."""
    with lead("from stages.worker import distributed\ndistributed.leave()\n") as process:
        assert process.wait(timeout=60) == 1


SENT_HOME = """
import socket, sys, time
from stages.worker import rank
from stages.worker.channel import Channel
rank.GRACE_SECONDS = 1
here, there = socket.socketpair()
lead = Channel(there)
lead.send({"welcome": {"ranks": 2, "coordinator": "", "silence": 0}})
rank.Member(1, Channel(here), 15)
lead.send({"bye": sys.argv[1]})
time.sleep(120)
"""


@pytest.mark.parametrize(("bye", "status"), [("end", joining.ENDED), ("again", joining.AGAIN)])
def test_a_rank_that_is_sent_home_does_not_stay_at_work(bye: str, status: int) -> None:
    """Nothing else would end one whose main thread waits in a collective: its lead has no more words for it."""
    with python(SENT_HOME, bye) as process:
        assert process.wait(timeout=60) == status
        assert process.stderr is not None and "rank 1: sent home, and still at work 1 s later" in process.stderr.read()


def test_a_rank_that_is_stopped_does_not_outlive_its_lead() -> None:
    with lead(WAITS) as process:
        assert process.stdout is not None
        rank = psutil.Process(int(process.stdout.readline()))
        rank.suspend()
        process.kill()
        process.wait()
        left = psutil.wait_procs([rank], timeout=5)[1]
        for one in left:
            one.kill()
    assert left == []

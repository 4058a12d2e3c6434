"""A lead takes the newest process of each rank, says for which it waits, and where it waits in vain what to do."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from stages.worker import channel, gang, interpreter
from stages.worker.client import Worker, WorkerDied
from stages.worker.protocol import Log
from tests.stages.worker.support import TOKEN, request, waiting
from tests.support import python


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_that_ends_while_others_still_come_may_come_again() -> None:
    with waiting(3) as (lead, come):
        come(1, 10).close()
        again = come(1, 11)
        # A rank is greeted before it is taken, and two of them by threads of their own.
        until(lambda: 1 in lead._members and lead._members[1].pid == 11)
        assert come(1, 12).receive(15) == {"refused": "rank 1 is there already, on a", "for_good": False}
        other = come(2, 20)
    assert {rank: member.pid for rank, member in lead._members.items()} == {1: 11, 2: 20}
    again.close()
    other.close()


def test_a_rank_that_has_ended_is_waited_for_as_one_that_has_not_come() -> None:
    with waiting(3) as (lead, come):
        first = come(1, 10)
        until(lambda: 1 in lead._members)
        first.close()
        until(lambda: 1 not in lead._members)
        others = [come(2, 20), come(1, 11)]
    assert {rank: member.pid for rank, member in lead._members.items()} == {1: 11, 2: 20}
    for other in others:
        other.close()


def test_a_lead_says_at_once_and_again_for_which_ranks_it_waits(monkeypatch) -> None:
    monkeypatch.setattr(gang, "TELL_SECONDS", 0.2)
    told: list[str] = []
    with waiting(4, told.append) as (lead, come):
        until(lambda: len(told) > 0)
        others = [come(2, 20)]
        until(lambda: told[-1].startswith("waiting for ranks 1, 3 of 4 "))
        others += [come(1, 10), come(3, 30)]
    assert told[0].startswith("waiting for ranks 1, 2, 3 of 4 at 127.0.0.1:")
    assert told[0].endswith(", 60 s at most (RLHF_GANG_WAIT)")
    for other in others:
        other.close()


def test_a_rank_that_reads_slowly_keeps_no_other_waiting() -> None:
    """What another has to say is heard while its share is still on the way, and all of it comes in order."""
    share = {"share": 0, "request": 0, "value": "x" * 30_000_000}
    with waiting(3) as (lead, come):
        quick, slow = come(1, 10), come(2, 20)
        until(lambda: len(lead._members) == 2)
        for member in lead._members.values():
            member.outbox.start(member.name)
        reading = threading.Thread(target=lead._read, args=[lead._members[1]], daemon=True)
        reading.start()
        quick.send(share)
        quick.send({"ended": "as it should", "request": 0})
        until(lambda: lead._members[1].ended is not None)
        ending = threading.Thread(target=lead.close, args=[False])
        ending.start()
        assert [slow.receive(30), slow.receive(30)] == [share, {"bye": "end"}]
        for one in (quick, slow):
            one.close()
        for thread in (ending, reading):
            thread.join(30)


UNREAD = """
import itertools, threading, time
from stages.worker import outbox
from tests.stages.worker.support import waiting

outbox.MOST = 2
with waiting(3) as (lead, come):
    quick, slow = come(1, 10), come(2, 20)
    while len(lead._members) < 2:
        time.sleep(0.01)
    lead._lost = lambda what: print(what, flush=True)
    for member in lead._members.values():
        member.outbox.start(member.name)
    threading.Thread(target=lead._read, args=[lead._members[1]]).start()
    for number in itertools.count():
        quick.send({"share": number, "request": 0, "value": "x" * 10_000_000})
"""


def test_a_rank_that_reads_nothing_is_the_one_that_is_named() -> None:
    process = python(UNREAD)
    out, log = process.communicate(timeout=60)
    assert out.splitlines()[-1] == "lost rank 2 (pid 20 on a) of 3, which does not read what it is sent,", log
    assert process.returncode == 1


def test_the_error_of_a_gang_without_a_rank_says_what_to_do_and_has_no_traceback(tmp_path, monkeypatch) -> None:
    with channel.listen("127.0.0.1", 0) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    for name, value in {"GANG": f"2@{address}", "GANG_TOKEN": TOKEN, "GANG_WAIT": "0.5"}.items():
        monkeypatch.setenv(f"RLHF_{name}", value)
    worker, events = Worker(tmp_path / "worker.log"), []
    with pytest.raises(WorkerDied) as died:
        worker.run(request(tmp_path), events.append)
    worker.close()
    first, second, *_ = str(died.value).splitlines()
    why = f"waited 0.5 s (RLHF_GANG_WAIT) in vain for rank 1 of 2 at {address}"
    assert first.startswith("the worker (pid ") and first.endswith(f") {why} in stage base")
    assert second.startswith(f"  start what is missing, as by `rlhf join {address} --rank 1`;")
    assert "Traceback" not in worker.log.read_text()
    assert [e.line.partition(",")[0] for e in events if isinstance(e, Log)] == [f"waiting for rank 1 of 2 at {address}"]


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="the system has no such signals")
def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 6)"
    done = subprocess.run([sys.executable, "-c", code])
    assert interpreter.end_of(done.returncode) == f"was ended by signal {signal.SIGRTMIN + 6}"

"""A lead takes the newest process of each rank, says for which it waits, and where it waits in vain what to do."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from stages.worker import channel, gang, interpreter
from stages.worker.channel import Channel
from stages.worker.client import Worker, WorkerDied
from stages.worker.gang import Gang
from stages.worker.places import Place
from stages.worker.protocol import Log
from tests.stages.worker.support import request

TOKEN = "0123456789abcdef"


@contextlib.contextmanager
def waiting(ranks: int, told: Callable[[str], None] = print) -> Iterator[tuple[Gang, Callable[[int, int], Channel]]]:
    """A lead that waits for its ranks, and how one joins by number and process id; within it all have to come."""
    with channel.listen("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        lead = Gang(Place(ranks, 0, "127.0.0.1", port, TOKEN, False, wait=60.0), print, print, told)
        thread = threading.Thread(target=lead._welcome_all, args=[server], daemon=True)
        thread.start()
        yield (
            lead,
            lambda rank, pid: channel.connect(
                "127.0.0.1", port, TOKEN, {"rank": rank, "host": "a", "pid": pid}, wait=15
            ),
        )
        thread.join(30)
    assert not thread.is_alive()
    for member in lead._members.values():
        member.channel.close()


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_that_ends_while_others_still_come_may_come_again() -> None:
    with waiting(3) as (lead, come):
        come(1, 10).close()
        again = come(1, 11)
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

"""What ranks of a gang tell one another reaches each of them, and none waits for a lead that has left."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from stages.worker.channel import Channel
from stages.worker.rank import Member
from tests.stages.worker.support import waiting


def test_what_all_ranks_tell_goes_to_each_in_one_message() -> None:
    with waiting(4) as (gang, join):
        opened = [join(rank, rank) for rank in (1, 2, 3)]
        while len(gang._members) < 3:
            time.sleep(0.01)
        for member in gang._members.values():
            member.outbox.start(member.name)
            threading.Thread(target=gang._read, args=[member], daemon=True).start()
        for rank in (3, 1, 2):
            opened[rank - 1].send({"gather": 0, "request": 0, "value": [rank]})
        assert gang.gather([0]) == [[0], [1], [2], [3]]
        gang._tell({"then": 1})
        for one in opened:
            assert one.receive(15) == {"share": 0, "request": 0, "value": [[0], [1], [2], [3]]}
            assert one.receive(15) == {"then": 1}
        gang._open = False


@contextlib.contextmanager
def a_rank() -> Iterator[tuple[Channel, Member]]:
    """A rank of three in this process, and its lead's end of the connection."""
    here, there = socket.socketpair()
    lead = Channel(there)
    # It would end this process after twice as many seconds.
    lead.send({"welcome": {"ranks": 3, "coordinator": "", "silence": 10**6}})
    before = set(threading.enumerate())
    member = Member(2, Channel(here), 15)
    own = [t for t in set(threading.enumerate()) - before if t.name in ("rank_read", "rank_beat")]
    try:
        yield lead, member
    finally:
        # Or with the connection, if it has not been sent home.
        lead.send({"bye": "end"})
        for thread in own:
            thread.join(15)
            assert not thread.is_alive()
        lead.close()
    assert len(own) == 2
    assert member.orders.get(timeout=15) == {"bye": "end"}


def test_a_rank_gathers_by_one_message_to_its_lead() -> None:
    with a_rank() as (lead, member):
        got: list = []
        thread = threading.Thread(target=lambda: got.append(member.gather([2])), daemon=True)
        thread.start()
        told = next(message for message in lead if "beat" not in message)
        assert told == {"gather": 0, "value": [2], "request": 0}
        lead.send({"share": 0, "request": 0, "value": [[0], [1], [2]]})
        thread.join(15)
        assert got == [[[0], [1], [2]]]


def test_what_is_gathered_reaches_a_rank_although_the_next_request_is_there() -> None:
    """The lead goes on as soon as it has told it."""
    with a_rank() as (lead, member):
        telling, told = threading.Event(), threading.Event()

        def answer(**_: object) -> None:
            telling.set()
            told.wait(15)

        member.answer = answer  # type: ignore[method-assign]
        got: list = []
        thread = threading.Thread(target=lambda: got.append(member.gather([2])), daemon=True)
        thread.start()
        assert telling.wait(15)
        lead.send({"share": 0, "request": 0, "value": [[0], [1], [2]]})
        lead.send({"run": {}, "request": 1})
        assert member.orders.get(timeout=15) == {"run": {}, "request": 1}
        told.set()
        thread.join(15)
        assert got == [[[0], [1], [2]]]


@pytest.mark.parametrize("word", [{"abandon": 1}, {"run": {}, "request": 2}, {"bye": "end"}], ids=str)
def test_a_rank_waits_for_no_lead_that_has_left_the_stage(word: dict) -> None:
    with a_rank() as (lead, member):
        member.begin(1)
        ended: list = []
        thread = threading.Thread(target=lambda: ended.append(outcome(lambda: member.gather([2]))), daemon=True)
        thread.start()
        assert next(message for message in lead if "beat" not in message)["request"] == 1
        lead.send(word)
        thread.join(15)
        assert ended == ["Abandoned: the lead has ended the stage"]
        if "bye" not in word:
            assert member.orders.get(timeout=15) == word


def test_what_a_late_rank_tells_is_of_its_own_request() -> None:
    """The lead may ask for the next stage before this one's thread is there."""
    with a_rank() as (lead, member):
        lead.send({"run": {}, "request": 1})
        assert member.orders.get(timeout=15) == {"run": {}, "request": 1}
        member.share(2, "late")
        member.begin(1)
        member.share(2, "own")
        told = [next(message for message in lead if "beat" not in message) for _ in range(2)]
        assert told == [{"share": 0, "value": "late", "request": 0}, {"share": 0, "value": "own", "request": 1}]


def outcome(run: Callable[[], object]) -> object:
    try:
        return run()
    except Exception as e:
        return f"{type(e).__name__}: {e}"

"""Lines between two hosts arrive once and in order, through a store that fails for a while."""

from __future__ import annotations

import json
import random
import threading
import time

import pytest

from stages.store.artifacts import Store
from stages.worker import mailbox
from stages.worker.mailbox import RUN, WORKER, Mailbox, Replaced

PLACE = ("runs", "r", "mail", "m")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(mailbox, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(mailbox, "BEAT_SECONDS", 0.1)


@pytest.fixture
def pair(tmp_path, quick):
    sides = [Mailbox(Store(str(tmp_path)), PLACE, mine) for mine in (RUN, WORKER)]
    for side in sides:
        side.start()
    yield sides
    for side in sides:
        side.close()


def all_of(side, count):
    return [side.receive(20) for _ in range(count)]


def test_lines_arrive_once_and_in_order_in_both_directions(pair):
    run, worker = pair
    for number in range(200):
        run.send(f"ask {number}")
        worker.send(f"answer {number}")
    assert all_of(worker, 200) == [f"ask {n}" for n in range(200)]
    assert all_of(run, 200) == [f"answer {n}" for n in range(200)]
    assert run.receive(0.3) is None and worker.receive(0.3) is None


def test_what_was_seen_is_not_written_again(pair, tmp_path):
    run, worker = pair
    for number in range(50):
        run.send("x" * 1000 + str(number))
        assert worker.receive(20) is not None
    deadline = time.monotonic() + 20
    while (tmp_path.joinpath(*PLACE, RUN)).stat().st_size > 1000:
        run.send("y")
        worker.receive(1)
        assert time.monotonic() < deadline
    assert len(run._lines) < 5


def test_of_passing_lines_that_were_not_seen_the_last_arrives(tmp_path, quick):
    run, worker = (Mailbox(Store(str(tmp_path)), PLACE, mine) for mine in (RUN, WORKER))
    for number in range(1000):
        worker.send(f"step {number}", passing=True)
    worker.send("log")
    worker.send("step 1000", passing=True)
    worker.start()
    run.start()
    assert all_of(run, 3) == ["step 999", "log", "step 1000"]
    run.close()
    worker.close()


class Failing(Store):
    """A store whose requests fail at times: before they are carried out, or behind it."""

    def __init__(self, url, seed):
        super().__init__(url)
        self.random, self.outage = random.Random(seed), False

    def write_bytes(self, data, *parts):
        if self.outage or self.random.random() < 0.3:
            raise ConnectionError("no route")
        super().write_bytes(data, *parts)
        if self.random.random() < 0.3:
            raise ConnectionError("the answer was lost")

    def read_json(self, *parts):
        if self.outage or self.random.random() < 0.3:
            raise ConnectionError("no route")
        return super().read_json(*parts)


def test_a_store_that_fails_at_times_loses_and_doubles_nothing(tmp_path, quick):
    stores = [Failing(str(tmp_path), seed) for seed in (1, 2)]
    sides = [Mailbox(store, PLACE, mine) for store, mine in zip(stores, (RUN, WORKER), strict=True)]
    for side in sides:
        while not side._thread.is_alive():
            try:
                side.start()
            except ConnectionError:
                continue
    run, worker = sides

    def talk():
        for number in range(100):
            worker.send(f"answer {number}")
            time.sleep(0.005)

    thread = threading.Thread(target=talk)
    thread.start()
    for number in range(100):
        run.send(f"ask {number}")
        time.sleep(0.005)
        if number == 50:
            stores[0].outage = True
            time.sleep(0.5)
            # Who cannot look knows nothing of the other side.
            assert run.cut > 0.2 and run.silent < 0.2
            stores[0].outage = False
    thread.join()
    assert all_of(worker, 100) == [f"ask {n}" for n in range(100)]
    assert all_of(run, 100) == [f"answer {n}" for n in range(100)]
    for side in sides:
        side.close()


def test_the_silence_of_one_that_has_ended_grows_and_a_living_one_has_none(pair):
    run, worker = pair
    time.sleep(1.0)
    assert run.silent < 0.6
    worker._closing = worker._left = True
    worker._thread.join()
    time.sleep(1.0)
    assert run.silent > 0.6


def test_one_that_closes_has_sent_all_that_it_had_to_send(pair):
    run, worker = pair
    for number in range(20):
        worker.send(str(number))
    worker.leave(20)
    assert all_of(run, 20) == [str(n) for n in range(20)]
    deadline = time.monotonic() + 20
    while not run.closed:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # The other waits until this one has closed too.
    ends = []
    thread = threading.Thread(target=lambda: ends.append(worker.close(20)))
    thread.start()
    time.sleep(0.2)
    assert ends == []
    assert run.close(20)
    thread.join(20)
    assert ends == [True]
    run.remove()
    assert run._store.names("runs", "r", "mail") == []


def test_a_store_that_is_out_of_reach_does_not_keep_one_that_closes(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(mailbox, "CLOSE_SECONDS", 0.5)
    store = Failing(str(tmp_path), 5)
    side = Mailbox(store, PLACE, RUN)
    while not side._thread.is_alive():
        try:
            side.start()
        except ConnectionError:
            continue
    store.outage = True
    since = time.monotonic()
    assert not side.close()
    assert time.monotonic() - since < 10 and not side._thread.is_alive()


def test_another_that_takes_a_place_is_told_from_the_one_that_was_asked(pair, tmp_path):
    run, worker = pair
    run.send("ask")
    assert worker.receive(20) == "ask"
    worker.send("answer")
    assert run.receive(20) == "answer"
    worker.close()
    # It begins its numbers anew, and nothing of it is taken for the other's.
    other = Mailbox(Store(str(tmp_path)), PLACE, WORKER)
    other.start()
    other.send("another answer")
    with pytest.raises(Replaced):
        run.receive(20)
    other.close()


def test_a_run_that_goes_on_closes_the_mailboxes_of_its_last_try(tmp_path, quick):
    store, place = Store(str(tmp_path)), (mailbox.FOLDER, "r", "train-1")
    left, worker = (Mailbox(store, place, mine) for mine in (RUN, WORKER))
    for side in (left, worker):
        side.start()
    left._closing = left._left = True  # as by a kill: it says nothing more
    left._thread.join()
    Mailbox(store, (mailbox.FOLDER, "r", "sample-1"), RUN)._write()
    assert not mailbox.is_left(store, place)
    assert mailbox.close_others(store, "r", "train") == [place]
    deadline = time.monotonic() + 20
    while not worker.closed:
        assert worker.receive(0.05) is None and time.monotonic() < deadline
    worker.close()
    assert mailbox.is_left(store, place)
    assert not json.loads((tmp_path / mailbox.FOLDER / "r" / "sample-1" / RUN).read_text())["closed"]


def test_an_outage_does_not_grow_what_is_sent_of_progress(tmp_path, quick):
    worker = Mailbox(Store(str(tmp_path)), PLACE, WORKER)
    for number in range(10_000):
        worker.send(f"step {number}", passing=True)
    assert len(worker._lines) == 1

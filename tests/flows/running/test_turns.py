"""A worker is had by one stage at a time, and what fills its time gives way to any that waits."""

from __future__ import annotations

import threading
import time

import pytest

from flows.running.turns import Turn


def nothing() -> None:
    pass


def begun(turn: Turn, within: threading.Event, go: threading.Event) -> threading.Thread:
    def stage() -> None:
        with turn.of_stage(nothing):
            within.set()
            go.wait(20)

    thread = threading.Thread(target=stage, daemon=True)
    thread.start()
    return thread


def test_what_fills_the_time_has_it_only_where_no_stage_does():
    turn, within, go = Turn(), threading.Event(), threading.Event()
    thread = begun(turn, within, go)
    assert within.wait(20)
    with turn.between(0.01) as free:
        assert not free
    go.set()
    thread.join(20)
    with turn.between(20) as free:
        assert free


def test_a_stage_that_waits_is_seen_and_comes_first():
    turn, within, go = Turn(), threading.Event(), threading.Event()
    with turn.between(0) as free:
        assert free and not turn.is_wanted
        thread = begun(turn, within, go)
        deadline = time.monotonic() + 20
        while not turn.is_wanted:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert not within.is_set()
    # The stage may not have woken up yet: it comes first all the same.
    with turn.between(0.05) as free:
        assert not free
    assert within.wait(20)
    go.set()
    thread.join(20)


def test_a_wait_that_lasts_is_told_of_once_with_what_the_worker_does(monkeypatch):
    monkeypatch.setattr("flows.running.turns.CHECK_SECONDS", 0.01)
    monkeypatch.setattr("flows.running.turns.TELL_SECONDS", 0.05)
    turn, within, go, told = Turn(), threading.Event(), threading.Event(), list[str]()

    def wait() -> None:
        with turn.of_stage(nothing, told.append):
            within.set()
            go.wait(20)

    with turn.between(0):
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        deadline = time.monotonic() + 20
        while not told:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.1)
    assert within.wait(20)
    go.set()
    thread.join(20)
    assert told == ["waits for its worker, which ends calls that were begun ahead, each within its own limit"]
    told.clear()
    with turn.of_stage(nothing, told.append):
        pass
    assert told == []


def test_a_wait_that_is_ended_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr("flows.running.turns.CHECK_SECONDS", 0.01)
    turn = Turn()

    def ended() -> None:
        raise InterruptedError

    with turn.between(0), pytest.raises(InterruptedError), turn.of_stage(ended):
        pass
    assert not turn.is_wanted
    with turn.between(0) as free:
        assert free

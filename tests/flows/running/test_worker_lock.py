"""One stage at a time has a worker."""

from __future__ import annotations

import threading
import time

import pytest

from rlhf.flows.running.worker_lock import Turn


def test_a_wait_that_lasts_is_reported_once(monkeypatch):
    monkeypatch.setattr("rlhf.flows.running.worker_lock.CHECK_SECONDS", 0.01)
    monkeypatch.setattr("rlhf.flows.running.worker_lock.TELL_SECONDS", 0.05)
    turn, within, told = Turn(), threading.Event(), list[str]()

    def wait() -> None:
        with turn.of_stage(lambda: None, told.append):
            within.set()

    with turn.of_stage(lambda: None):
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        time.sleep(0.3)
        assert told == ["waits for its worker, which makes another stage"] and not within.is_set()
    assert within.wait(20)
    thread.join(20)
    with turn.of_stage(lambda: None, told.append):
        assert len(told) == 1


def test_a_wait_that_is_ended_leaves_the_turn_to_others(monkeypatch):
    monkeypatch.setattr("rlhf.flows.running.worker_lock.CHECK_SECONDS", 0.01)
    turn = Turn()

    def ended() -> None:
        raise InterruptedError

    with turn.of_stage(ended), pytest.raises(InterruptedError), turn.of_stage(ended):
        pass
    with turn.of_stage(ended):
        pass

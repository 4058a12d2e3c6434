"""The actor of a host: a call that Ray repeats, or that arrives late, changes nothing."""

import dataclasses

import pytest

from rlhf.stages.worker import interpreter
from rlhf.stages.worker.protocol import Done
from rlhf.stages.worker.ray_actor import HostWorker
from tests.stages.worker.support import request


@pytest.mark.slow
def test_calls_that_arrive_twice_or_late_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(interpreter, "PROJECT", tmp_path)
    worker = HostWorker("host", None)
    first = request(tmp_path / "store")
    second = dataclasses.replace(first, key="l" * 64)

    def run(number, asked):
        worker.begin(number, asked)
        worker.begin(number, asked)
        events = []
        while not events or not isinstance(events[-1], Done):
            events += worker.poll(number, len(events), 0)[0]
        # Asked once more, as for the log alone, it forgets nothing.
        assert worker.poll(number, 0, 0)[0][-1:] == events[-1:]
        return events

    try:
        assert run(1, first)[-1].manifest["key"] == first.key
        worker.begin(2, second)
        worker.begin(1, first)
        assert worker.poll(1, 0, 0) == ([], b"")
        events = run(2, second)
        assert [event.manifest["key"] for event in events if isinstance(event, Done)] == [second.key]
    finally:
        worker.close()

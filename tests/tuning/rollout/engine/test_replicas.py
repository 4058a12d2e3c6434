"""Replicas: nothing that has ended is kept, and a step that fails loses no update."""

import time
import weakref

import jax
import pytest

from rlhf.tuning.axes import Axes
from rlhf.tuning.mesh import make_mesh
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.replicas import Replicas
from rlhf.tuning.rollout.requests import RefusedRequest, Request
from tests.tuning.rollout.engine.support import PARAMS
from tests.tuning.tiny import CONFIG

LIMITS = Limits(slots=1, context=32, steps=4, chunks=(32,))


def replicas():
    mesh = make_mesh(Axes(1, 1, 1), jax.local_devices()[:1])
    engine = Replicas(CONFIG, limits=LIMITS, mesh=mesh)
    engine.load(PARAMS)
    return engine


def test_a_failed_step_loses_no_update(monkeypatch):
    engine = replicas()
    begin = Engine.begin
    engine.submit(Request([1, 2, 3], 16))
    engine.step()
    queued = engine.submit(Request([4, 5, 6], 16))
    engine.cancel(queued)

    def fails(self, crowded=False):
        monkeypatch.setattr(Engine, "begin", begin)
        raise ZeroDivisionError("of the device")

    monkeypatch.setattr(Engine, "begin", fails)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert (queued, "cancelled") in [(u.number, u.completion.stop) for u in engine.step() if u.completion]


def test_a_failed_step_is_raised_once_no_engine_is_at_work(monkeypatch):
    engine, ended, first = replicas(), [], iter([True])
    engine._engines *= 2

    def begin(self, crowded=False):
        if next(first, False):
            raise ZeroDivisionError("of the device")
        time.sleep(0.2)
        ended.append(self)

    monkeypatch.setattr(Engine, "begin", begin)
    with pytest.raises(ZeroDivisionError):
        engine._begin([0, 1])
    assert len(ended) == 1


def test_a_request_is_refused_as_it_comes_where_any_engine_lacks_the_memory():
    engine = replicas()
    small = Engine(CONFIG, limits=Limits(slots=1, context=16, steps=4))
    engine._engines.append(small)
    with pytest.raises(RefusedRequest, match="16 tokens of context"):
        engine.submit(Request([1] * 12, 12))


def test_completions_that_a_batch_has_given_are_its_callers_alone():
    engine = replicas()
    given = []
    for _, completions in engine.run([Request([1, 2, i], 4, counter=i) for i in range(4)]):
        given += map(weakref.ref, completions)
        completions.clear()
        # The newest one is still that of the step which has ended it.
        assert not any(completion() for completion in given[:-1])

"""Replicas: where they are, that nothing that has ended is kept, and that a step that fails loses no update."""

import contextlib
import subprocess
import sys
import threading
import weakref

import jax
import numpy as np
import pytest

from rlhf.tuning.axes import Axes
from rlhf.tuning.mesh import make_mesh
from rlhf.tuning.rollout.engine import pool
from rlhf.tuning.rollout.engine.cache import token_bytes
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.live import EngineStopped, Live
from rlhf.tuning.rollout.engine.placement import places_of, replicas_of, sampling_axes
from rlhf.tuning.rollout.engine.pool import Pool
from rlhf.tuning.rollout.engine.replicas import Replica, Replicas
from rlhf.tuning.rollout.requests import RefusedRequest, Request
from tests.tuning.rollout.engine.support import PARAMS
from tests.tuning.tiny import CONFIG

LIMITS = Limits(slots=1, context=32, steps=4, chunks=(32,))


def replicas(count=1):
    mesh = make_mesh(Axes(1, 1, 1), jax.local_devices()[:1])
    engine = Replicas(CONFIG, limits=LIMITS, mesh=mesh)
    # Further engines on the same device.
    engine._places *= count
    engine.replicas += [Replica(Engine(CONFIG, limits=LIMITS)) for _ in range(count - 1)]
    engine.load(PARAMS)
    return engine


@pytest.mark.slow
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


def test_steps_of_two_engines_are_under_way_at_once(monkeypatch):
    engine, both, begin = replicas(2), threading.Barrier(2), Engine.begin

    def meets(self, crowded=False):
        # One engine after the other would never meet here.
        both.wait(timeout=60)
        begin(self, crowded)

    monkeypatch.setattr(Engine, "begin", meets)
    done = dict(engine.run([Request([1, 2, i], 16, counter=i) for i in range(6)]))
    assert [len(done[i][0].tokens) for i in range(6)] == [16] * 6
    assert engine.steps == [48, 48]


def test_calls_during_a_step_follow_at_its_end():
    engine = replicas(2)
    first, second = (engine.submit(Request([1, 2, i], 16, counter=i, keep=True)) for i in range(2))
    # The second engine is at a step when this returns.
    engine.step()
    assert [replica.step is None for replica in engine.replicas] == [True, False]
    engine.cancel(second)
    third = engine.submit(Request([7, 8, 9], 16))
    ended = {}
    while not engine.idle:
        ended |= {u.number: u.completion for u in engine.step() if u.completion}
    assert {number: completion.stop for number, completion in ended.items()} == {
        first: "length",
        second: "cancelled",
        third: "length",
    }
    # The slot of the first is kept, and its run continues there.
    prompt = [1, 2, 0, *ended[first].tokens]
    after = engine.submit(Request(prompt, 4, after=first))
    updates = []
    while not engine.idle:
        updates += engine.step()
    assert [u.number for u in updates if u.completion] == [after]


def test_a_server_stops_where_one_of_two_engines_fails_again_and_again(monkeypatch):
    engine, begin = replicas(2), Engine.begin
    broken = engine.engines[1]

    def fails(self, crowded=False):
        if self is broken:
            raise ZeroDivisionError("of the device")
        begin(self, crowded)

    with contextlib.closing(Live(engine)) as live:
        # The other engine succeeds between two failures.
        live.submit(Request([1, 2, 3], 4)).result()
        monkeypatch.setattr(Engine, "begin", fails)
        for number in range(200):
            with contextlib.suppress(EngineStopped):
                streams = [live.submit(Request([number % 90, i], 4, counter=i)) for i in range(2)]
                for stream in streams:
                    with contextlib.suppress(EngineStopped):
                        stream.result()
            if live.failure is not None:
                break
        assert isinstance(live.failure, ZeroDivisionError) and live.failed_steps < 5


@pytest.mark.slow
def test_a_step_that_hangs_does_not_hold_the_end_of_the_process():
    # As a collective that a lost device never ends.
    program = "\n".join(
        [
            "import threading, time",
            "from types import SimpleNamespace",
            "from rlhf.tuning.rollout.engine.replicas import Replica",
            "started = threading.Event()",
            "hang = lambda crowded: (started.set(), time.sleep(3600))",
            "Replica(SimpleNamespace(begin=hang)).begin(False)",
            "assert started.wait(60)",
        ]
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0


def test_a_batch_that_its_caller_gives_up_leaves_no_engine_at_work():
    engine = replicas(2)
    results = engine.run([Request([1, 2, i], 4 + 12 * (i % 2), counter=i) for i in range(6)])
    next(results)
    results.close()
    assert engine.idle and all(replica.step is None and not replica.dealt for replica in engine.replicas)
    assert len(dict(engine.run([Request([1, 2, 3], 4)]))) == 1


def test_a_request_is_refused_as_it_comes_where_any_engine_lacks_the_memory():
    engine = replicas()
    small = Engine(CONFIG, limits=Limits(slots=1, context=16, steps=4))
    engine.replicas.append(Replica(small))
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


@pytest.mark.parametrize(
    ("axes", "replicas", "tensor"),
    [(Axes(), 8, 1), (Axes(tensor=2), 4, 2), (Axes(2, 2, 2), 4, 2), (Axes(1, 1, 8), 1, 8)],
)
def test_every_axis_but_tensor_is_replicas(axes, replicas, tensor):
    found = sampling_axes(axes, 8)
    assert (found.data, found.fsdp, found.tensor) == (replicas, 1, tensor)


def test_one_device_is_one_replica():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    assert places_of(mesh) == jax.devices()[:1]
    assert replicas_of(mesh) == replicas_of(None) == 1


def size_of(monkeypatch, free, **limits):
    # Devices of a CPU do not tell their memory.
    monkeypatch.setattr(pool, "free_bytes", lambda place: free)
    found = Pool(CONFIG, Limits(slots=1000, context=60, steps=4, **limits), "float32", None, rolled=False)
    found.fit({})
    return found.most(60)


def test_slots_have_their_share_of_what_is_free_and_a_little_more_of_it_changes_no_shape(monkeypatch):
    slot = 64 * token_bytes(CONFIG, "float32")
    assert size_of(monkeypatch, 160 * slot, cache_share=0.75) in range(105, 121)
    assert size_of(monkeypatch, 161 * slot, cache_share=0.75) == size_of(monkeypatch, 160 * slot, cache_share=0.75)
    assert size_of(monkeypatch, None, cache_share=0.75, cache_bytes=5 * slot) == 5
    assert size_of(monkeypatch, 160 * slot, cache_bytes=5 * slot) == 5

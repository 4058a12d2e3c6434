"""What the worker keeps between stages: as much as a device has room for, and always the newest policy and trainer."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.stages.common import models
from rlhf.stages.common.compilation import use_precision
from rlhf.stages.common.models import bytes_by_device, recall, remember
from rlhf.tuning.precision import real, using
from rlhf.tuning.settings import ComputeSettings

ROOM = 1000
"""Bytes of the device's share."""


@pytest.fixture(autouse=True, scope="module")
def small_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf.tuning.device.memory_bytes", lambda: ROOM)
        patch.setattr(models, "MEMORY_SHARE", 1.0)
        yield


def worker():
    return types.SimpleNamespace(memory={})


def arrays(size):
    return {"w": jnp.zeros(size, jnp.int8)}


def test_the_least_recently_used_leave_when_the_share_is_full():
    ctx = worker()
    for name in ("a", "b", "c"):
        remember(ctx, name, arrays(400))
    assert list(ctx.memory) == ["b", "c"]
    recall(ctx, "b")
    remember(ctx, "d", arrays(400))
    assert list(ctx.memory) == ["b", "d"]


def test_what_is_not_on_the_device_takes_no_room_there_and_stays():
    ctx = worker()
    ctx.memory["tokenizer:t"] = object()
    remember(ctx, "host", np.zeros(10 * ROOM, np.int8))
    remember(ctx, "a", arrays(900))
    remember(ctx, "b", arrays(900))
    assert list(ctx.memory) == ["tokenizer:t", "host", "b"]


def test_an_array_that_two_values_share_counts_once():
    ctx, shared = worker(), arrays(600)
    remember(ctx, "decoder:a", shared)
    remember(ctx, "frozen:a", (shared, arrays(300)))
    assert len(ctx.memory) == 2 and list(bytes_by_device(ctx.memory).values()) == [900]


def test_a_value_that_the_stage_asks_for_stays_however_large():
    ctx = worker()
    remember(ctx, "a", arrays(10))
    remember(ctx, "b", arrays(5 * ROOM))
    assert list(ctx.memory) == ["b"]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(100, 3000)),
        st.tuples(st.sampled_from(["decoder:base", "frozen:x", "scorer:y"]), st.integers(0, 3000)),
        st.tuples(st.just("use"), st.just(0)),
    ),
    max_size=12,
)


@pytest.mark.slow
@settings(deadline=None)
@given(steps)
def test_the_newest_policy_and_its_trainer_stay_until_their_successor_is_there(sequence):
    ctx, newest = worker(), None
    for number, (what, size) in enumerate(sequence):
        if what == "update":
            remember(ctx, f"decoder:{number}", arrays(size))
            remember(ctx, f"trainer:{number}", arrays(2 * size))
            newest = number
        elif what == "use" and newest is not None:
            recall(ctx, f"decoder:{newest}")
        elif what != "use":
            remember(ctx, what, arrays(size))
        if newest is not None:
            assert {f"decoder:{newest}", f"trainer:{newest}"} <= ctx.memory.keys()
            # Over the share only what may not leave is kept: the pair, and the value of this step.
            rest = ctx.memory.keys() - {f"decoder:{newest}", f"trainer:{newest}", what}
            if what != "use" and rest:
                assert max(bytes_by_device(ctx.memory).values()) <= ROOM


def test_what_a_worker_keeps_leaves_with_the_type_of_weights():
    class Config:
        compute = ComputeSettings("float64")

    memory = {"decoder:x": 1}
    with using("float32"):
        use_precision(None, memory)
        assert memory
        use_precision(Config, memory)
        assert real() == np.float64 and not memory
    assert real() == np.float32

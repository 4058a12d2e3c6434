"""Where replicas are, and how many slots the memory that weights leave gives them."""

import jax
import numpy as np
import pytest

from rlhf.tuning.axes import Axes
from rlhf.tuning.rollout.engine import pool
from rlhf.tuning.rollout.engine.cache import token_bytes
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.placement import places_of, replicas_of, sampling_axes
from rlhf.tuning.rollout.engine.pool import Pool
from tests.tuning.tiny import CONFIG


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

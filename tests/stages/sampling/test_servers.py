"""What servers are given: one copy of a policy for all of them, and nothing loaded that none asks for."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from flax import nnx

from stages.sampling import servers


@pytest.fixture
def loads(monkeypatch):
    """How many threads load a policy at each load."""
    inside, seen, lock = [0], [], threading.Lock()

    def load(ctx, artifact, quantize):
        with lock:
            inside[0] += 1
            seen.append(inside[0])
        time.sleep(0.05)
        with lock:
            inside[0] -= 1
        return None, nnx.State({})

    monkeypatch.setattr(servers, "load_rounded", load)
    return seen


def test_servers_that_take_tensors_side_by_side_load_the_policy_one_after_the_other(loads):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: list(servers._tensors(None, None, "none", {})), range(4)))
    assert loads == [1, 1, 1, 1]

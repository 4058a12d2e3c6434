"""An engine on a mesh of its own, apart from the trainer's: the samples of one device."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found():
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.tuning.rollout.engine.mesh_program"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "of", "shape"),
    [
        ("replicas", "one", {"data": 4, "fsdp": 1, "tensor": 1}),
        ("tensor", "one", {"data": 2, "fsdp": 1, "tensor": 2}),
        ("both", "one", {"data": 2, "fsdp": 1, "tensor": 2}),
        ("small tensor", "small one", {"data": 2, "fsdp": 1, "tensor": 2}),
    ],
)
def test_samples_are_those_of_one_device(found, name, of, shape):
    one, other = found[of], found[name]
    assert other["mesh"] == shape and other["devices"] == [4, 5, 6, 7]
    assert other["tokens"] == one["tokens"] and other["again"] and other["compiled"] == 0
    for mine, theirs in zip(other["logps"], one["logps"], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            # Keys that differ in the last bit may differ in the last of bfloat16.
            np.testing.assert_allclose(a, b, atol=1e-4 if of == "one" else 0.02)


def test_replicas_share_slots_and_tensor_parallel_ones_share_weights_too(found):
    assert found["replicas"]["share_of_weights"] == 1.0 and found["replicas"]["share_of_cache"] == 0.25
    # Embeddings, which are whole on each device here, are more of a quantised model.
    for name, most in (("tensor", 0.6), ("small tensor", 0.7)):
        assert found[name]["share_of_weights"] < most and found[name]["share_of_cache"] == 0.25

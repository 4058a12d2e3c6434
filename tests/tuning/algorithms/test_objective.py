"""One ragged batch, every split: micro-batches, packing and meshes give one loss and one gradient (R1)."""

import json
import os
import subprocess
import sys

import pytest

from tests.tuning.algorithms.objective_program import LAYOUTS, MESHES, OBJECTIVES, difference, loss_and_gradient


@pytest.mark.parametrize(
    "name", ["token-mean", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gspo", "constant"))]
)
def test_micro_batches_and_packing_change_nothing(name):
    wanted = loss_and_gradient(OBJECTIVES[name], LAYOUTS["one"])
    # The second and third objective take one other split each: every split is compiled.
    others = ["rows", "long"] if name == "token-mean" else [list(LAYOUTS)[1 + (name == "gspo")]]
    assert wanted[2] == 1
    for other in others:
        found = loss_and_gradient(OBJECTIVES[name], LAYOUTS[other])
        assert found[2] > 1
        assert max(difference(found, wanted)) < 1e-6


@pytest.mark.slow
def test_meshes_change_nothing():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.tuning.algorithms.objective_program", *OBJECTIVES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(OBJECTIVES) * len(MESHES)
    for name, differences in found.items():
        assert max(differences) < 1e-6, name

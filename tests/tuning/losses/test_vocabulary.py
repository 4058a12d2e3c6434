"""A vocabulary that is cut over devices: heads, distillation and lookups are those of one device; no table moves."""

import json
import subprocess
import sys

import pytest

from tests.support import QUICK, with_devices

PROGRAM = "tests.tuning.losses.vocabulary_program"


@pytest.fixture(scope="module")
def found():
    environment = with_devices(8, QUICK)
    done = subprocess.run([sys.executable, "-m", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor", "all"])
def test_values_and_gradients_are_those_of_one_device(found, mesh):
    # Sums of some hundreds of terms of up to some tens.
    assert found[mesh]["gap"] < 1e-10


def test_over_tensor_alone_nothing_is_gathered(found):
    assert not [name for name in found["tensor"]["collectives"] if "gather" in name]

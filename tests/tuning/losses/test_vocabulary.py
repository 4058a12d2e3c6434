"""A vocabulary that is cut over devices: heads, distillation and lookups are those of one device; no table moves."""

import pytest

from tests.support import QUICK
from tests.tuning.programs import printed


@pytest.fixture(scope="module")
def found():
    return printed("losses.vocabulary_program", flags=QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor", "all"])
def test_values_and_gradients_are_those_of_one_device(found, mesh):
    # Sums of some hundreds of terms of up to some tens.
    assert found[mesh]["gap"] < 1e-10


@pytest.mark.slow
def test_over_tensor_alone_nothing_is_gathered(found):
    assert not [name for name in found["tensor"]["collectives"] if "gather" in name]

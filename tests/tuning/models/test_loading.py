"""Weights go from files to the devices that keep them: a device gets its part, the host holds one part at a time."""

import pytest

from tests.tuning.programs import printed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return printed("models.load_program", tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize(("axes", "parts"), [("fsdp", 8), ("tensor", 8), ("both", 8), ("copies", 4)])
@pytest.mark.parametrize("kind", ["decoder", "scorer"])
def test_each_device_holds_its_part_and_the_weights_are_those_of_one_device(found, kind, axes, parts):
    loaded = found["small"][kind][axes]
    assert loaded["same"] and loaded["placed"]
    assert loaded["share"] <= 1 / parts + 0.02


def test_a_checkpoint_of_a_gigabyte_is_loaded_through_one_part_at_a_time(found):
    large = found["large"]
    assert large["right"] and large["written"] > 1e9
    assert max(large["devices"]) <= large["loaded"] * (1 / 8 + 0.02)
    # Devices of a CPU are in the host's memory: what was loaded is there once, with less than a parameter beside it.
    assert large["grown"] - large["loaded"] < large["largest"] / 2

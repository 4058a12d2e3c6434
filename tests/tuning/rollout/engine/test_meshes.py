"""Engines side by side on a mesh apart from the trainer's: the samples of one device, and nobody waits for another."""

import numpy as np
import pytest

from tests.support import QUICK
from tests.tuning.programs import printed

pytestmark = pytest.mark.slow

SLOTS, STEPS = 8, 4
"""Of the two engines of `mesh_program` together, and tokens that one decodes before it looks."""


@pytest.fixture(scope="module")
def found():
    return printed("rollout.engine.mesh_program", flags=QUICK, timeout=900)


@pytest.mark.parametrize(
    ("name", "of", "tolerance"),
    [
        ("two", "one", 1e-5),
        ("eight", "one", 1e-5),
        ("tensor", "one", 1e-4),
        ("whole", "one", 1e-4),
        ("paged one", "one", 1e-5),
        ("paged two", "one", 1e-5),
        ("paged eight", "one", 1e-5),
        ("paged tensor", "one", 1e-4),
        # Keys that differ in the last bit may differ in the last of bfloat16.
        ("small tensor", "small one", 0.02),
    ],
)
def test_samples_are_those_of_one_device(found, name, of, tolerance):
    assert found[name]["tokens"] == found[of]["tokens"]
    for mine, theirs in zip(found[name]["logps"], found[of]["logps"], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=tolerance)


def test_a_batch_comes_again_to_the_bit_and_compiles_nothing(found):
    assert found["again"] and found["compiled"] == 0


def test_each_replica_has_all_weights_on_its_own_devices(found):
    (whole,) = found["one"]["weights"].values()
    for name, devices in (("two", [6, 7]), ("eight", list(range(8)))):
        assert found[name]["weights"] == {str(d): whole for d in devices}
        assert found[name]["cache_devices"] == devices
    for name, devices in (("tensor", [4, 5, 6, 7]), ("whole", [6, 7])):
        # Matrices of layers and the embedding are halved, norms are on both.
        assert set(found[name]["weights"]) == {str(d) for d in devices}
        assert all(0.5 * whole < held < 0.6 * whole for held in found[name]["weights"].values())
        assert found[name]["cache_devices"] == devices


def test_no_slot_is_empty_while_a_run_waits(found):
    lengths, steps = found["skewed"]["lengths"], found["skewed"]["steps"]
    # The first token of a run may come in the middle of a look, and it leaves at the end of one.
    rounded = [-(-n // STEPS) * STEPS for n in lengths]
    assert max(steps) <= max(rounded) + sum(rounded) / SLOTS
    assert all(s > 0 for s in steps)


def test_turns_stay_where_their_slot_is_kept(found):
    places = found["turns"]["places"]
    assert len(places) == 4 and all(len(set(where)) == 1 for where in places.values())
    assert {where[0] for where in places.values()} == {0, 1}
    assert found["turns"]["taken"] == 0


def test_a_server_over_replicas_serves_what_comes_after_a_failed_step(found):
    assert found["served"] == {"failed": True, "equal": True, "later": True, "cancelled": "cancelled"}


def test_no_program_of_a_replica_gathers_a_cache(found):
    assert set(found["gathered"]) == {"prefill none", "prefill one", "prefill many", "decode"}
    assert max(found["gathered"].values()) < 2**20

"""One model on 1, 2, 4 and 8 devices, and on two processes: the same losses and parameters, whichever axis cuts what;
checkpoints move between meshes."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf.tuning.axes import Axes
from rlhf.tuning.mesh import make_mesh
from tests.support import QUICK, free_port
from tests.tuning.programs import printed

PROGRAM = "training.mesh_program"


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sft", "grpo", "gspo", "dpo", "distill"])
def test_steps_are_those_of_one_device_on_every_mesh(loss):
    # Many programs that run once: little is gained by making them fast.
    found = printed("training.axes_program", loss, flags=QUICK)
    assert len(found) == 7
    assert {name: gap for name, gap in found.items() if max(gap) > 1e-10} == {}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return printed(PROGRAM, tmp_path_factory.mktemp("mesh"))


@pytest.mark.slow
def test_parameters_are_cut_by_fsdp_and_tensor(found):
    assert found["share"] == pytest.approx(1 / 4)


@pytest.mark.slow
def test_a_checkpoint_of_four_devices_goes_on_on_eight(found):
    assert found["restored"] and found["restored_on"] == 8
    assert found["resumed"] == pytest.approx(found["fourth"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "moments"), [("adafactor", 0), ("muon", 10)])
def test_other_optimizers_keep_their_moments_beside_the_parameters(found, name, moments):
    rule = found["rules"][name]
    assert rule["gap"] < 1e-6
    assert all(rule["beside"]) and len(rule["beside"]) >= moments


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantised_kernels_are_cut_too_and_an_adapter_learns_the_same(found, kind):
    assert found["adapters"][kind]["share"] == 1 / 4
    assert found["adapters"][kind]["gap"] < 1e-6


@pytest.mark.slow
def test_two_processes_train_one_model(found, tmp_path):
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda i: printed(PROGRAM, tmp_path, i, 2, port, devices=2), range(2)))
    assert both[0] == both[1] and both[0]["devices"] == 4
    assert both[0]["losses"] == pytest.approx(found["plain"], abs=1e-5)


def test_a_mesh_that_does_not_fit_the_devices_is_refused():
    with pytest.raises(ValueError, match="asks for 3 devices, there are 1"):
        make_mesh(Axes(3, 1, 1))
    with pytest.raises(ValueError, match="one size may be -1"):
        make_mesh(Axes(-1, -1, 1))

"""One model on 1, 2, 4 and 8 devices, and on two processes: the same losses and parameters, whichever axis cuts what;
checkpoints move between meshes."""

import json
import socket
import subprocess
import sys

import pytest

from rlhf.tuning.axes import Axes
from rlhf.tuning.mesh import make_mesh
from tests.support import QUICK, with_devices

PROGRAM = "tests.tuning.training.mesh_program"
AXES = "tests.tuning.training.axes_program"
ALL = "data,fsdp,tensor,context,data fsdp tensor,data fsdp context,fsdp tensor context"


def start(devices, *args, program=PROGRAM, flags=""):
    environment = with_devices(devices, flags)
    command = [sys.executable, "-m", program, *map(str, args)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


def gaps(dtype, loss, meshes):
    """The largest gaps of two steps' losses and of the parameters after them, by mesh."""
    # Many programs that run once: little is gained by making them fast.
    return result(start(8, dtype, loss, meshes, program=AXES, flags=QUICK))


@pytest.mark.slow
def test_steps_are_those_of_one_device_where_rows_width_and_vocabulary_are_cut_at_once():
    found = gaps("float64", "sft", "fsdp tensor context")
    assert max(found["sft fsdp tensor context"]) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sft", "grpo", "dpo", "distill"])
def test_steps_are_those_of_one_device_on_every_mesh(loss):
    found = gaps("float64", loss, ALL)
    assert len(found) == 7
    assert {name: gap for name, gap in found.items() if max(gap) > 1e-10} == {}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return result(start(8, tmp_path_factory.mktemp("mesh")))


@pytest.mark.slow
def test_losses_agree_on_every_mesh(found):
    meshes = {k: v for k, v in found.items() if "Axes" in k}
    assert len(meshes) == 3
    for name, losses in meshes.items():
        assert losses == pytest.approx(found["plain"], abs=1e-5), name
    assert found["plain"][2] < found["plain"][0] - 0.1


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
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    both = [result(p) for p in [start(2, tmp_path, i, 2, port) for i in range(2)]]
    assert both[0] == both[1] and both[0]["devices"] == 4
    assert both[0]["losses"] == pytest.approx(found["plain"], abs=1e-5)


def test_a_mesh_that_does_not_fit_the_devices_is_refused():
    with pytest.raises(ValueError, match="asks for 3 devices, there are 1"):
        make_mesh(Axes(3, 1, 1))
    with pytest.raises(ValueError, match="one size may be -1"):
        make_mesh(Axes(-1, -1, 1))

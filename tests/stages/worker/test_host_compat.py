"""Hosts are compared by properties that no key contains; their kind of device is known without loading JAX."""

import pytest

from rlhf.stages.worker import devices, host_compat
from rlhf.stages.worker.devices import CPU
from rlhf.stages.worker.host_compat import difference, properties
from tests.support import finish, python

PLAIN = {"PATH": "/bin", "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": "/c", "JAX_CUDA_VISIBLE_DEVICES": "0"}
GPU = "gpu:NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    "name", ["JAX_THREEFRY_PARTITIONABLE", "JAX_DEFAULT_PRNG_IMPL", "XLA_FLAGS", "NVIDIA_TF32_OVERRIDE"]
)
def test_variables_that_change_results_are_compared_and_others_are_not(name):
    here, there = properties(GPU, PLAIN), properties(GPU, PLAIN | {name: "x"})
    assert difference(here, properties(GPU, {}), same_kind=True) is None
    assert (
        difference(here, there, same_kind=True) == f"{name} is x there and not set on the run's host: make them equal"
    )
    assert (
        difference(there, here, same_kind=True) == f"{name} is not set there and x on the run's host: make them equal"
    )


def test_hosts_with_another_kind_of_device_have_flags_of_their_own():
    here = properties(CPU, {})
    assert difference(here, properties(GPU, {"XLA_FLAGS": "--xla_gpu_autotune_level=2"}), same_kind=False) is None
    assert difference(here, properties(GPU, {"JAX_ENABLE_X64": "1"}), same_kind=False) is not None


def test_processors_and_compilers_count_where_a_role_computes_on_processors(monkeypatch):
    here = properties(CPU, PLAIN)
    assert difference(here, properties(CPU, PLAIN | {"CC": "no-such-compiler"}), same_kind=True) is not None
    monkeypatch.setattr(host_compat, "instructions", lambda: "0123abcd")
    assert "processor is " in str(difference(here, properties(CPU, PLAIN), same_kind=True))
    assert difference(properties(GPU, PLAIN), properties(GPU, PLAIN), same_kind=True) is None


def test_another_python_is_named():
    here = properties(GPU, {})
    assert "Python is cpython 3.99 there" in str(difference(here, here | {"Python": "cpython 3.99"}, same_kind=True))


ASK = "import sys; from rlhf.stages.worker.devices import device_kind; print(device_kind(), 'jax' in sys.modules)"


@pytest.mark.slow
def test_jax_is_asked_once_where_there_is_a_plugin(tmp_path, monkeypatch):
    (tmp_path / "path" / "jax_plugins").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.setenv("RLHF_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert devices.device_kind.__wrapped__() == devices.CPU
    (answer,) = (tmp_path / "scratch" / "devices").iterdir()
    assert answer.read_text() == devices.CPU
    # The next process reads the answer.
    answer.write_text("gpu:Abacus")
    assert devices.device_kind.__wrapped__() == "gpu:Abacus"
    # Another choice of devices is another question.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert devices.device_kind.__wrapped__() == devices.CPU
    devices.forget()
    monkeypatch.delenv("JAX_PLATFORMS")
    devices.forget()
    assert not answer.exists()


def test_the_kind_of_device_is_told_without_jax():
    assert finish(python(ASK)).split() == [devices.device_kind(), "False"]

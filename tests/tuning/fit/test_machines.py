"""Machines by name, and the package that compiles for each."""

import pytest

from rlhf.tuning.axes import Axes
from rlhf.tuning.fit.machines import machine


@pytest.mark.parametrize(
    ("name", "kind", "devices"),
    [("v5e-16", "v5e", 16), ("v5p-64", "v5p", 32), ("v5px32", "v5p", 32), ("h100x8", "h100", 8), ("h200", "h200", 1)],
)
def test_a_name_is_a_kind_and_a_number_of_devices(name, kind, devices):
    found = machine(name)
    assert (found.kind.name, found.count) == (kind, devices)
    assert 0.7 * found.kind.memory_bytes < found.limit < found.kind.memory_bytes


@pytest.mark.parametrize("name", ["v5e16", "tpu-8", ""])
def test_an_unknown_kind_is_refused_with_those_that_there_are(name):
    with pytest.raises(ValueError, match=f"--on {name}: .*kinds: v5e, v5p"):
        machine(name)


@pytest.mark.parametrize("name", ["h100x0", "v5p-0", "v5p-7", "h100x9", "h100x3", "v5e-12", "v5p-24"])
def test_a_number_that_there_is_not_is_refused_with_those_that_there_are(name):
    with pytest.raises(ValueError, match=f"--on {name}: no such machine; .* has 1, 2, 4, 8"):
        machine(name)


def test_the_products_own_choices_are_those_of_the_kind():
    tpu, cpu = machine("v5e-8").choices("auto"), machine("cpu").choices("auto")
    assert tpu.compute.dtype == "bfloat16" and tpu.compute.remat == "full"
    assert tpu.memory_bytes == machine("v5e-8").limit
    assert cpu.compute.dtype == "float32" and cpu.compute.remat == "products"


@pytest.mark.parametrize(("name", "package"), [("v5e-8", "libtpu"), ("h100x8", "jax-cuda13-plugin")])
def test_without_the_compiler_there_is_its_name_and_a_mesh_for_sums(name, package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = machine(name)
    assert found.uncompiled.startswith(package)
    assert found.mesh(Axes(1, -1, 2)).shape == {"data": 1, "fsdp": 4, "tensor": 2}


def test_this_machine_needs_no_package():
    found = machine("cpu")
    assert found.uncompiled == "" and len(found.devices) == found.count

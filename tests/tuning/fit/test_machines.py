"""Machines by name: kinds with their public figures, and what a name counts."""

import pytest

from tuning.fit.machines import KINDS, machine


@pytest.mark.parametrize(
    ("name", "kind", "devices"),
    [("v5e-16", "v5e", 16), ("v5p-64", "v5p", 32), ("v6e-8", "v6e", 8), ("h100x8", "h100", 8), ("h200", "h200", 1)],
)
def test_a_name_is_a_kind_and_a_number_of_devices(name, kind, devices):
    found = machine(name)
    assert (found.kind.name, found.count) == (kind, devices)
    assert 0.7 * found.kind.memory_bytes < found.limit < found.kind.memory_bytes


@pytest.mark.parametrize("name", ["v5e16", "tpu-8", "h100x0", "v5p-7", "h100x9", "v5e-12", "v5e-512", "v5p-20", ""])
def test_another_name_is_refused_with_what_there_is(name):
    with pytest.raises(ValueError, match="--on"):
        machine(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h100x0", "it has no device; the least is 1"),
        ("v5p-0", "it has no device; the least is 2"),
        ("v5p-7", "the number counts TensorCores, 2 a chip"),
        ("h100x9", "it is a multiple of 8"),
        ("v5e-7", "slices are powers of two"),
    ],
)
def test_a_number_that_there_is_not_is_told_with_those_that_there_are(name, said):
    with pytest.raises(ValueError, match=f"--on {name}: .*{said}"):
        machine(name)


def test_gpus_of_several_hosts_send_by_the_network():
    assert machine("h100x16").link_rate < machine("h100x8").link_rate == KINDS["h100"].link_rate


def test_the_products_own_choices_are_those_of_the_kind():
    tpu, cpu = machine("v5e-8").choices("auto"), machine("cpu").choices("auto")
    assert (
        tpu.compute.dtype == "bfloat16" and tpu.compute.remat == "full" and tpu.memory_bytes == machine("v5e-8").limit
    )
    assert cpu.compute.dtype == "float32" and cpu.compute.remat == "products"

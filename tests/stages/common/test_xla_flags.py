"""XLA's flags: known to the library that reads them, behind the user's own, and none for a CPU by itself."""

import importlib.util
import mmap
from pathlib import Path

import pytest

from rlhf.stages.common.xla_flags import FLAGS, GPU_MEMORY, OF_GROUPS, value_of, with_flags
from rlhf.stages.worker.client import worker_environment
from rlhf.tuning.fit.machines import USABLE

PLATFORMS = ("gpu", "tpu")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_name_occurs_in_the_library_that_reads_it(platform):
    package, library = {"gpu": ("jaxlib", "libjax_common.so"), "tpu": ("libtpu", "libtpu.so")}[platform]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    with (Path(spec.submodule_search_locations[0]) / library).open("rb") as f:
        content = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        flags = [*FLAGS[platform], *(OF_GROUPS["cpu"] if package == "jaxlib" else ())]
        assert [flag.name for flag in flags if content.find(flag.name.encode()) < 0] == []


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_the_user_sets_stays(platform):
    first, *others = FLAGS[platform]
    before = {first.variable: f"--{first.name}=false --mine=3"}
    after = with_flags(before, platform)
    assert after[first.variable].startswith(before[first.variable])
    assert value_of(first, after) == "false"
    assert {value_of(flag, after) for flag in others} == {"true"}
    assert with_flags(after, platform) == after


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_file_of_flags_stays(platform, tmp_path):
    """XLA takes what begins with no dash for the name of a file, and ends a process where there is none of the name."""
    before = {flag.variable: str(tmp_path / "flags.txt") for flag in FLAGS[platform]}
    after = with_flags(before, platform)
    assert {name: after[name] for name in before} == before


def test_jax_takes_the_share_of_a_gpus_memory_that_fit_counts_unless_the_user_says_another():
    name, value = GPU_MEMORY
    assert float(value) == USABLE["gpu"]
    assert with_flags({}, "gpu")[name] == value and with_flags({name: "0.5"}, "gpu")[name] == "0.5"
    assert name not in with_flags({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, "gpu")
    assert name not in with_flags({}, "tpu") and name not in with_flags({}, "cpu")


def test_cpus_that_compute_together_have_their_collectives_in_one_order(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--mine=3")
    found = worker_environment(group=True)["XLA_FLAGS"]
    assert found == "--mine=3 --xla_cpu_enable_concurrency_optimized_scheduler=false"
    assert worker_environment()["XLA_FLAGS"] == "--mine=3"

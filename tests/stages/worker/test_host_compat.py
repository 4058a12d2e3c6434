"""What a key does not hold is compared between hosts: checkout, Python, and variables that change bits."""

from __future__ import annotations

import shutil

from stages.worker.sameness import difference, of_this_host

from stages.worker import sameness

PLAIN = {"PATH": "/bin", "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": "/c", "JAX_CUDA_VISIBLE_DEVICES": "0"}


def other(there, here, computes=True, other_kind=False):
    return difference(there, here, computes, other_kind)


def test_variables_that_change_what_is_computed_are_compared_and_others_are_not():
    here = of_this_host(PLAIN)
    assert other(here, of_this_host({})) is None
    for name in ("JAX_THREEFRY_PARTITIONABLE", "JAX_DEFAULT_PRNG_IMPL", "XLA_FLAGS", "NVIDIA_TF32_OVERRIDE"):
        elsewhere = of_this_host(PLAIN | {name: "x"})
        assert other(here, elsewhere) == f"{name} is x here and not set where the run is: give both the same"
        assert other(elsewhere, here) == f"{name} is not set here and x where the run is: give both the same"
        # A stage that reads files computes by none of them.
        assert other(here, elsewhere, computes=False) is None


def test_flags_of_a_device_are_those_of_its_own_kind_of_host():
    here, elsewhere = of_this_host({}), of_this_host({"XLA_FLAGS": "--xla_gpu_autotune_level=2"})
    assert other(here, elsewhere, other_kind=True) is None
    assert other(here, of_this_host({"JAX_ENABLE_X64": "1"}), other_kind=True) is not None


def test_another_python_is_named():
    here = of_this_host({})
    there, this = here | {"Python": "cpython 3.99"}, here | {"Python": "cpython 3.11"}
    for computes in (True, False):
        assert "Python is cpython 3.11 here and cpython 3.99" in str(other(there, this, computes))


def test_any_source_of_the_project_counts_also_such_as_no_import_reaches(tmp_path, monkeypatch):
    for package in sameness.PACKAGES:
        shutil.copytree(sameness.PROJECT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    here = of_this_host({})
    monkeypatch.setattr(sameness, "PROJECT", tmp_path)
    assert other(here, of_this_host({})) is None
    for name in ("tuning/rollout/engine/cpu/products.c", "stages/common/flags.py", "stages/worker/process.py"):
        path = tmp_path / name
        text = path.read_text()
        path.write_text(text + "\n")
        assert str(other(here, of_this_host({}), computes=False)).startswith(f"{name} is another here"), name
        path.write_text(text)
    (tmp_path / "stages" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "stages" / ".ipynb_checkpoints" / "base.py").touch()
    assert other(here, of_this_host({})) is None
    (tmp_path / "stages" / "new.py").touch()
    assert str(other(here, of_this_host({}))).startswith("stages/new.py is another here")

"""What a key does not hold is compared between hosts: checkout, Python, and variables that change bits."""

from __future__ import annotations

import shutil

from stages.worker import sameness
from stages.worker.sameness import difference, of_this_host

PLAIN = {
    "PATH": "/bin",
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": "/c",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "x",
}


def test_variables_that_change_what_is_computed_are_compared_and_others_are_not():
    here = of_this_host(PLAIN)
    assert here.keys() == {"Python", "this project"} and difference(here, of_this_host({})) is None
    for name in ("JAX_THREEFRY_PARTITIONABLE", "JAX_DEFAULT_PRNG_IMPL", "XLA_FLAGS", "NVIDIA_TF32_OVERRIDE"):
        other = of_this_host(PLAIN | {name: "x"})
        assert difference(here, other) == f"{name} is x here and not set where the run is: give both the same"
        assert difference(other, here) == f"{name} is not set here and x where the run is: give both the same"


def test_another_python_is_named():
    here = of_this_host({})
    assert "Python is cpython 3.11 here and cpython 3.99" in str(
        difference(here | {"Python": "cpython 3.99"}, here | {"Python": "cpython 3.11"})
    )


def test_any_source_of_the_project_counts_also_such_as_no_import_reaches(tmp_path, monkeypatch):
    for package in sameness.PACKAGES:
        shutil.copytree(sameness.PROJECT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    here = of_this_host({})
    monkeypatch.setattr(sameness, "PROJECT", tmp_path)
    assert difference(here, of_this_host({})) is None
    for name in ("tuning/rollout/engine/cpu/products.c", "stages/common/flags.py", "stages/worker/process.py"):
        path = tmp_path / name
        text = path.read_text()
        path.write_text(text + "\n")
        assert "the sources of this project are others here" in str(difference(here, of_this_host({}))), name
        path.write_text(text)
    (tmp_path / "stages" / "new.py").touch()
    assert difference(here, of_this_host({})) is not None

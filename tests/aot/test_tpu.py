"""The real TPU compiler takes every program, within what is committed of it; `make tpu` installs it."""

import shutil
import subprocess
import sys

import pytest

from tests.aot.bounds import committed, table
from tests.aot.cases import CASES, SMALL
from tests.oracle.support import ROOT, mutated


def compiled(case, **options):
    # A process each: libtpu serves one at a time, and a case leaves nothing behind.
    return subprocess.run(
        [sys.executable, "-m", "tests.aot", "--only", case.name], capture_output=True, text=True, **options
    )


@pytest.mark.aot
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("case", [c for c in CASES if c.platform == "tpu"], ids=lambda case: case.name)
def test_it_compiles_within_its_bounds(case):
    done = compiled(case)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"


# By name: file, what is replaced in it, by what, and what is said.
MUTATIONS = {
    "a kernel is not cut over the mesh by hand": (
        "tuning/models/attention.py",
        "    if mesh.size <= 1:\n",
        "    if True:\n",
        "Mosaic kernels cannot be automatically partitioned",
    ),
    "one kernel of the MLP is whole on every device": (
        "tuning/models/sharding.py",
        '"kernel": (size_in, size_out)',
        '"kernel": (None, None) if "gate" in names else (size_in, size_out)',
        "arguments and results take",
    ),
    "logits are gathered": (
        "tuning/losses/head.py",
        "    return z * scale\n",
        "    return jax.lax.with_sharding_constraint(z * scale, jax.sharding.PartitionSpec())\n",
        "all-gather f32 of up to",
    ),
}


@pytest.mark.aot
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_change_for_the_worse_is_found_and_its_program_named(name, tmp_path):
    file, old, new, said = MUTATIONS[name]
    env = mutated(tmp_path, (file, old, new))
    shutil.copytree(ROOT / "tests" / "aot", tmp_path / "tests" / "aot")
    done = compiled(SMALL, cwd=tmp_path, env=env)
    assert done.returncode == 1 and f"{SMALL.name}: " in done.stderr and said in done.stderr, done.stderr[-3000:]


def test_the_docs_have_the_table_of_the_bounds():
    known = committed()
    names = [case.name for case in CASES]
    assert [n for n in names if n in known] == list(known)
    assert table(known, names) in (ROOT / "docs" / "devices.md").read_text()

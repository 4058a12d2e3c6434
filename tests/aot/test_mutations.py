"""The bounds find what they are there for: each of these changes of a copy of the product is told with its program."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.aot.cases import SMALL, SMALL_GPU
from tests.oracle.support import ROOT, mutated

# By name: the program that tells, file, what is replaced in it, by what, and what is said behind the program's name.
MUTATIONS = {
    "a kernel is not cut over the mesh by hand": (
        SMALL,
        "tuning/models/attention.py",
        "    if mesh is None:\n        return attend(",
        "    if True:\n        return attend(",
        r"NotImplementedError: Mosaic kernels cannot be automatically partitioned",
    ),
    "one kernel of the MLP is whole on every device": (
        SMALL_GPU,
        "tuning/models/sharding.py",
        '"kernel": (size_in, size_out)',
        '"kernel": (None, None) if "gate" in names else (size_in, size_out)',
        r"arguments and results take [\d.,]+ MB a device, committed are ",
    ),
    "the LM head is not cut over the mesh by hand": (
        SMALL_GPU,
        "tuning/models/sharding.py",
        "        if mesh is None or positions % parts(mesh, ROWS):\n",
        "        if True:\n",
        # Hidden states of 2,048 positions, 512 wide, in bfloat16.
        r"1 all-to-all bf16 of up to 2,097,152 bytes, committed are 0",
    ),
}


@pytest.mark.aot
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_change_for_the_worse_is_found_and_its_program_named(name, tmp_path):
    case, file, old, new, said = MUTATIONS[name]
    env = mutated(tmp_path, (file, old, new))
    shutil.copytree(ROOT / "tests" / "aot", tmp_path / "tests" / "aot")
    command = [sys.executable, "-m", "tests.aot", "--only", case.name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert re.search(f"^{re.escape(case.name)}: {said}", done.stderr, re.MULTILINE), done.stderr[-3000:]

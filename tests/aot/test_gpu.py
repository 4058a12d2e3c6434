"""The real compiler for eight H100 takes every program, within what is committed of it; `make gpu-aot` installs it."""

import subprocess
import sys

import pytest

from tests.aot.cases import CASES


@pytest.mark.aot
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("case", [c for c in CASES if c.platform == "gpu"], ids=lambda case: case.name)
def test_it_compiles_within_its_bounds(case):
    command = [sys.executable, "-m", "tests.aot", "--only", case.name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"

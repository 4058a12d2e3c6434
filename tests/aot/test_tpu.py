"""The real TPU compiler takes every program, within what is committed of it; `make tpu` installs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.aot.bounds import BOUNDS, CASES, table


@pytest.mark.tpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_compiles_within_its_bounds(case):
    # A process each: libtpu serves one at a time, and a case leaves nothing behind.
    done = subprocess.run([sys.executable, "-m", "tests.aot", "--only", case.name], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"


def test_every_case_has_bounds_and_a_row_in_the_docs():
    known = json.loads(BOUNDS.read_text())
    assert sorted(known) == sorted(case.name for case in CASES)
    assert table(known) in (Path(__file__).parents[2] / "docs" / "devices.md").read_text()

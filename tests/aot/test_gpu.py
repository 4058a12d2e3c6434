"""The real compiler for eight H100 takes every program, within what is committed of it; `make gpu-aot` installs it."""

import subprocess
import sys

import pytest

from rlhf.tuning.fit.needs import peak
from tests.aot.bounds import committed
from tests.aot.cases import CASES, SMALL_GPU
from tests.tuning.fit.steps import elsewhere


@pytest.mark.aot
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("case", [c for c in CASES if c.platform == "gpu"], ids=lambda case: case.name)
def test_it_compiles_within_its_bounds(case):
    command = [sys.executable, "-m", "tests.aot", "--only", case.name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"


@pytest.mark.aot
@pytest.mark.timeout(1000)
def test_fit_has_the_peak_of_the_compiler():
    step, on = elsewhere(SMALL_GPU)
    known, needs = committed()[SMALL_GPU.name], step.needs(on)
    assert peak(needs, on) / 1e6 == pytest.approx(known["held_mb"] + known["temporary_mb"], rel=0.05)

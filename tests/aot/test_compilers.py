"""The real compilers take every program, within what is committed of it: `make tpu` and `make gpu-aot` install them."""

import subprocess
import sys

import pytest

from rlhf.tuning.fit.needs import peak
from tests.aot.bounds import PAGE, committed, table
from tests.aot.cases import CASES, MIXTURE_GPU, SMALL, SMALL_GPU
from tests.tuning.fit.steps import elsewhere


def name_of(case):
    """Begins with the platform, which `-k` chooses."""
    return f"{case.platform} {case.name}"


@pytest.mark.aot
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_it_compiles_within_its_bounds(case):
    # A process each: a case leaves nothing behind.
    done = subprocess.run([sys.executable, "-m", "tests.aot", "--only", case.name], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"


def test_the_docs_have_the_table_of_the_bounds():
    known = committed()
    names = [case.name for case in CASES]
    assert [n for n in names if n in known] == list(known)
    assert table(known, names) in PAGE.read_text()


@pytest.mark.aot
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("case", [SMALL, SMALL_GPU, MIXTURE_GPU], ids=name_of)
def test_fit_has_the_peak_of_the_compiler(case):
    step, on = elsewhere(case)
    known, needs = committed()[case.name], step.needs(on)
    assert peak(needs, on) / 1e6 == pytest.approx(known["held_mb"] + known["temporary_mb"], rel=0.05)

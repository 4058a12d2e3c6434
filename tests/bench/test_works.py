"""Each measurement of `python -m tests.bench` runs on the product as it is; what it measures is judged by no test."""

import json
import subprocess
import sys

import pytest

from rlhf.stages.worker.client import worker_environment
from tests.bench.__main__ import WORKS
from tests.oracle.support import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("work", WORKS)
def test_a_measurement_ends_with_one_line_of_results(work):
    command = [sys.executable, "-m", "tests.bench", work, "--model", "tiny", "--repeats", "1", "--here"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=worker_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = done.stdout.splitlines()
    found = json.loads(line)
    assert found["work"] == work
    assert found["median_s"] > 0

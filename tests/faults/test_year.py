"""Nights that nobody watches: each ends as it must, is told where a person must know of it, and leaves no more behind.

`make year` plays 365 of them.
"""

import json
import subprocess
import sys

import pytest

from tests.flows.prefect_server import PROJECT


@pytest.mark.slow
def test_twelve_nights_end_as_they_must(tmp_path):
    command = [sys.executable, "-m", "tests.faults.year", "--nights", "12", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=1500)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout
    assert rows[-1] == {"ended": {"promoted": 2, "nothing new": 7, "refused": 2, "failed": 1}, "alerts": 3}
    [hung] = [row for row in rows[:-1] if row["ended"] == "failed"]
    assert hung["state"] == "TimedOut" and "limits.run_seconds" in hung["message"]

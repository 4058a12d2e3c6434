"""`tests.bench.gpu_first` and `gpu_second` on small shapes, so that they run when a GPU is lent."""

import subprocess
import sys

import pytest

from rlhf.stages.worker.client import worker_environment
from tests.bench import gpu_first, gpu_second
from tests.pages import ROOT

EXPERIMENTS = gpu_first.EXPERIMENTS | gpu_second.EXPERIMENTS
VARIANTS = {v: variables for e in EXPERIMENTS.values() for v, variables in e.variants.items() if variables}
MODULES = (gpu_first, gpu_second)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "E1"])
def test_an_experiment_prints_its_figures(name, capsys):
    EXPERIMENTS[name].run(True)
    assert "=" in (found := capsys.readouterr().out) or '"median_s"' in found


@pytest.mark.parametrize("module", MODULES)
def test_a_script_takes_six_minutes_at_most(module):
    assert sum(e.seconds * len(e.variants) for e in module.EXPERIMENTS.values()) <= 360


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_jax_knows_the_flags_of_a_variant(variant):
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    subprocess.run(command, env=worker_environment() | VARIANTS[variant], check=True, timeout=120)


@pytest.mark.slow
def test_the_script_runs_each_experiment_in_a_process(monkeypatch):
    def run(name):
        command = [sys.executable, "-m", "tests.bench.gpu_first", name, "--tiny"]
        return subprocess.run(command, cwd=ROOT, env=worker_environment(), capture_output=True, text=True, timeout=300)

    done = run("E1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("E1 as stages run; expected: passes") and lines[-1].startswith("E1 ended in")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    failed = run("E1")
    assert failed.returncode == 1 and "E1 FAILED after" in failed.stdout

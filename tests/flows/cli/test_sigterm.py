"""SIGTERM, with which pods are drained, ends a run and a rank as Ctrl-C does: at once and recorded."""

import os
import signal
import subprocess
import time

import psutil
import pytest

from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.report.console import ConsoleReporter
from rlhf.flows.running.session import Session
from rlhf.stages.store.artifacts import Store
from tests.support import RLHF, until

pytestmark = pytest.mark.slow


@pytest.fixture
def started(tmp_path):
    processes = []

    def start(*arguments, **environment):
        process = subprocess.Popen(
            [RLHF, *arguments], stderr=subprocess.PIPE, text=True, env=os.environ | environment, cwd=tmp_path
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def children(process):
    """What a process has started, as soon as there is something."""
    until(lambda: psutil.Process(process.pid).children(recursive=True))
    return psutil.Process(process.pid).children(recursive=True)


def test_sigterm_ends_a_run_without_prefect_as_interrupted(started, tmp_path):
    run = started("run", "smoke", "--no-prefect", "--name", "drained", "--store", str(tmp_path / "store"))
    begun = children(run)
    run.terminate()
    assert run.wait(timeout=30) == 130
    assert "interrupted; finished stages are kept" in run.stderr.read()
    assert Store(str(tmp_path / "store")).read_json("runs", "drained", "run.json")["status"] == "interrupted"
    assert list((tmp_path / "store" / "leases").iterdir()) == []
    assert psutil.wait_procs(begun, timeout=10)[1] == []


def test_sigterm_ends_a_cached_run_that_starts_no_server_as_interrupted(started, store, tmp_path):
    run = started("run", "smoke", "--name", "drained", "--store", str(store), PREFECT_HOME=str(tmp_path))
    until(lambda: Store(str(store)).read_json("runs", "drained", "run.json"))
    run.terminate()
    assert run.wait(timeout=30) == 130
    assert Store(str(store)).read_json("runs", "drained", "run.json")["status"] == "interrupted"


def test_signals_that_come_together_are_one_interruption_and_do_not_end_its_recording(started, tmp_path):
    """Slurm sends SIGTERM to all processes of a job, among them a script that sends Ctrl-C to the run."""
    run = started("run", "smoke", "--no-prefect", "--name", "stopped", "--store", str(tmp_path / "store"))
    children(run)
    run.terminate()
    burst = time.monotonic() + 2
    while run.poll() is None and time.monotonic() < burst:
        run.send_signal(signal.SIGINT)
        time.sleep(0.002)
    # A signal that finds Python gone ends the process itself: to a shell both are 130.
    assert run.wait(timeout=30) in (130, -signal.SIGINT)
    assert run.stderr.read().count("already ending; another signal after 5 s ends at once\n") == 1
    assert Store(str(tmp_path / "store")).read_json("runs", "stopped", "run.json")["status"] == "interrupted"


def test_a_signal_during_the_start_is_recorded_too(tmp_path, monkeypatch):
    def interrupted(saver, soon=False):
        monkeypatch.undo()
        saver.save(soon)
        raise KeyboardInterrupt

    monkeypatch.setattr("rlhf.flows.running.session.Saver.save", interrupted)
    recipe = load_recipe("smoke", sets=[f"store={tmp_path}"])
    with pytest.raises(KeyboardInterrupt):
        Session(recipe, ConsoleReporter(), "early")
    assert Store(str(tmp_path)).read_json("runs", "early", "run.json")["status"] == "interrupted"

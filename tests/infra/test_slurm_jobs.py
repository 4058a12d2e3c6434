"""Signals, ends and restarts of the script under a real Slurm, with a short shell script in place of the run."""

import shutil
import time
from pathlib import Path

import pytest

from tests.infra.slurm import INFRA, NODES, Slurm, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(bool(why_not()), reason=why_not())]
STAYS = "trap 'echo interrupted; exit 130' INT TERM; echo begun; while true; do sleep 0.2; done"
"""A run until it is interrupted."""


class Job:
    """A job whose run is a script for bash; `commands` go before those of Slurm."""

    def __init__(self, cluster: Slurm, folder: Path, run: str, *options: str, commands: dict[str, str] | None = None):
        self.cluster, self.folder = cluster, folder
        (folder / "infra").symlink_to(INFRA)
        self.executable(folder / ".venv" / "bin" / "rlhf", run)
        for name, text in (commands or {}).items():
            self.executable(folder / "bin" / name, text)
        path = f"{folder / 'bin'}:{cluster.environment['PATH']}"
        self.number = cluster.submit(
            "slurm.sbatch", *options, folder=folder, environment={"PATH": path}, RUN="run", STORE="store"
        )

    @staticmethod
    def executable(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def output(self) -> str:
        return self.cluster.output(self.number)

    def until_it_says(self, text: str, count: int = 1) -> None:
        self.cluster.until(lambda: self.output().count(text) == count, text, 120, self.number)

    def until_it_is_back(self) -> None:
        restarts = lambda: self.cluster.job(self.number)["Restarts"]  # noqa: E731
        self.cluster.until(lambda: restarts() == "1", "the queue", 120, self.number)

    def is_cancelled(self) -> None:
        self.cluster.command("scancel", str(self.number))
        self.cluster.ends(self.number, "CANCELLED", 90)


def once(command: str, text: str, *words: str) -> str:
    """A command of Slurm that does as `text` says when it is called first with these words, and what it is for then."""
    real = shutil.which(command)
    return f'if [[ "$*" = *"{" ".join(words)}"* ]] && mkdir "$0.called" 2> /dev/null; then {text}; fi\nexec {real} "$@"'


def test_a_job_whose_time_is_over_when_it_has_begun_comes_back_once_and_ends_with_the_reason(cluster, tmp_path) -> None:
    job = Job(cluster, tmp_path, STAYS, "--time=1", "--signal=B:USR1@55")
    output = cluster.ends(job.number, "FAILED", 300)
    assert "after its start, as before; give the job more --time" in output
    assert cluster.job(job.number)["Restarts"] == "1"


def test_a_job_comes_back_as_often_as_a_variable_says(cluster, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(cluster.environment, "RLHF_RESTARTS", "1")
    job = Job(cluster, tmp_path, "exit 130")
    assert "after 1 restarts (RLHF_RESTARTS=1)" in cluster.ends(job.number, "FAILED", 180)
    assert cluster.job(job.number)["Restarts"] == "1"


def test_a_job_comes_back_when_slurmctld_has_been_away_for_a_moment(cluster, tmp_path) -> None:
    fails = {"scontrol": once("scontrol", "echo scontrol is away; exit 1", "requeue")}
    job = Job(cluster, tmp_path, f"{STAYS.replace('true', '[ ! -e over ]')}; exit 130", commands=fails)
    job.until_it_says("begun")
    cluster.end("slurmctld")
    try:
        (tmp_path / "over").touch()
        cluster.until(lambda: "slurm_load_jobs error" in job.output(), "an error of squeue", 120, job.number)
    finally:
        cluster.start_controller()
    (tmp_path / "over").unlink()
    job.until_it_is_back()
    assert "scontrol is away" in job.output()
    job.is_cancelled()


def test_a_preempted_run_is_interrupted_at_once_and_not_when_the_grace_is_over(cluster, tmp_path) -> None:
    job = Job(cluster, tmp_path, STAYS)
    job.until_it_says("begun")
    (cluster.project / "urgent.sh").write_text("#!/bin/sh\n")
    cluster.command("sbatch", "--partition=urgent", f"--nodes={len(NODES)}", "--gpus-per-node=8", "urgent.sh")
    begun = time.monotonic()
    cluster.until(lambda: "interrupted" in job.output(), "the interruption", 120, job.number)
    # GraceTime is a minute.
    assert time.monotonic() - begun < 40
    job.until_it_is_back()
    job.is_cancelled()


def test_a_signal_that_comes_before_the_step_is_not_lost(cluster, tmp_path) -> None:
    slow = {"srun": once("srun", "echo later; sleep 10")}
    job = Job(cluster, tmp_path, STAYS, commands=slow)
    job.until_it_says("later")
    cluster.command("scancel", "--batch", "--signal=USR1", str(job.number))
    job.until_it_is_back()
    job.is_cancelled()

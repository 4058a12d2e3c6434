"""Metrics of a stage on disk: what was written is there at once, as JSON lines and for TensorBoard."""

import json
import subprocess
import sys

import pytest
from tensorboardX.proto.event_pb2 import Event

from rlhf.stages.contract.metrics import TRACKERS, Metrics


def scalars(folder):
    """(tag, step, value) of a folder's event files."""
    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
    return found


def test_rows_reach_both_files_before_the_next_is_written(tmp_path):
    metrics = Metrics(tmp_path, "run.sft")
    metrics.write({"step": 0, "loss": 2.5, "note": "first"})
    metrics.write({"step": 1, "loss": float("nan")})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {"step": 0, "loss": 2.5, "note": "first"} and len(lines) == 2
    metrics.close()
    assert ("loss", 0, 2.5) in scalars(tmp_path / "tensorboard")
    assert {(tag, step) for tag, step, _ in scalars(tmp_path / "tensorboard")} == {
        ("step", 0), ("loss", 0), ("step", 1), ("loss", 1)
    }  # fmt: skip


@pytest.mark.parametrize("variable", TRACKERS)
def test_a_tracker_that_is_not_installed_is_an_error_that_says_what_to_install(tmp_path, monkeypatch, variable):
    package = variable.partition("_")[0].lower()
    monkeypatch.setenv(variable, "tuning")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RuntimeError, match=rf"{variable} is set.* pip install 'rlhf-pipeline\[{package}\]'"):
        Metrics(tmp_path, "run.sft")


def test_mlflow_has_the_numbers_of_each_stage_in_a_run_of_its_own(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'runs'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("run.sft", "run.reward"):
        metrics = Metrics(tmp_path / name, name)
        metrics.write({"step": 0, "loss": 2.5, "note": "first"})
        metrics.write({"step": 1, "loss": 1.5})
        metrics.close()
    found = mlflow.search_runs(experiment_names=["rlhf-pipeline"], output_format="list")
    assert {run.info.run_name: (run.info.status, run.data.metrics["loss"]) for run in found} == {
        "run.sft": ("FINISHED", 1.5),
        "run.reward": ("FINISHED", 1.5),
    }


def test_torch_and_boto3_are_not_imported_where_they_are_installed(tmp_path):
    code = (
        "import pathlib, sys; from rlhf.stages.contract.metrics import Metrics; "
        f"Metrics(pathlib.Path({str(tmp_path)!r}), 'x').close(); "
        f"sys.exit(not {{'torch', 'boto3'}}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    import boto3
    import torch

    assert torch.zeros(1) == 0 and boto3.Session is not None


def test_a_tracker_whose_server_fails_is_left_out(tmp_path, monkeypatch, capsys):
    class Away:
        def log(self, numbers, step):
            raise ConnectionError("no route")

    monkeypatch.setitem(TRACKERS, "WANDB_PROJECT", lambda folder, name: Away())
    monkeypatch.setitem(TRACKERS, "MLFLOW_TRACKING_URI", lambda folder, name: Away().log({}, 0))
    monkeypatch.setenv("WANDB_PROJECT", "x")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://x")
    metrics = Metrics(tmp_path, "run.sft")
    for step in range(2):
        metrics.write({"step": step})
    metrics.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert capsys.readouterr().out.count("no route") == 2

"""Logs of a running stage's metrics: JSON lines, TensorBoard, and the trackers that the environment asks for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Metrics:
    """One row after the other, under `logs/` of the artifact (logs are no content).

    `metrics.jsonl` has every value, `tensorboard/` the numbers, with the count of rows as the step. The numbers also go
    to each of TRACKERS with its variable set.
    """

    def __init__(self, folder: Path, name: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = (folder / "metrics.jsonl").open("a")
        self._board = _summary_writer()(str(folder / "tensorboard"), filename_suffix=f".{name}", write_to_disk=True)
        trackers = [_tracker(variable, folder, name) for variable in TRACKERS if os.environ.get(variable)]
        self._trackers = [tracker for tracker in trackers if tracker is not None]
        self._rows = 0

    def write(self, values: dict[str, Any]) -> None:
        """Writes a row; it is on disk when this returns."""
        self._lines.write(json.dumps(values) + "\n")
        self._lines.flush()
        numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
        for name, value in numbers.items():
            self._board.add_scalar(name, value, self._rows)
        # Both logs are flushed: a kill loses no row.
        self._board.flush()
        self._each(lambda tracker: tracker.log(numbers, step=self._rows))
        self._rows += 1

    def close(self) -> None:
        """Closes all logs."""
        self._lines.close()
        self._board.close()
        self._each(lambda tracker: tracker.finish())

    def _each(self, action: Callable[[Any], object]) -> None:
        """Do something with each tracker, and leave out one whose server fails: the rows are here."""
        for tracker in list(self._trackers):
            try:
                action(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                print(f"no more metrics of this stage go to a tracker: {error!r}", flush=True)


def _summary_writer() -> Any:
    """tensorboardX's SummaryWriter.

    Where torch and boto3 are installed tensorboardX imports them, which takes seconds; it needs torch for tensors of
    torch, and boto3 for logs that it writes to S3 itself.
    """
    # None in sys.modules makes an import an ImportError, which tensorboardX expects.
    absent = [name for name in ("torch", "boto3") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        from tensorboardX import SummaryWriter
    finally:
        for name in absent:
            del sys.modules[name]
    return SummaryWriter


def _wandb(folder: Path, name: str) -> Any:
    import wandb

    # create_new: a worker runs several stages in one process, each with a run of its own.
    return wandb.init(project=os.environ["WANDB_PROJECT"], name=name, dir=str(folder), reinit="create_new")


def _trackio(folder: Path, name: str) -> Any:
    import trackio

    return trackio.init(project=os.environ["TRACKIO_PROJECT"], name=name, embed=False)


class _MLflow:
    """A run of MLflow with the methods of the others."""

    def __init__(self, folder: Path, name: str):
        from mlflow import MlflowClient, log_metrics, set_experiment

        self._client, self._log = MlflowClient(), log_metrics
        experiment = set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "rlhf-pipeline")).experiment_id
        self._run = self._client.create_run(experiment, run_name=name).info.run_id

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._log(numbers, step=step, run_id=self._run)

    def finish(self) -> None:
        self._client.set_terminated(self._run)


TRACKERS = {"WANDB_PROJECT": _wandb, "TRACKIO_PROJECT": _trackio, "MLFLOW_TRACKING_URI": _MLflow}
"""By the environment variable that asks for it; each is an extra of this project."""


def _tracker(variable: str, folder: Path, name: str) -> Any:
    try:
        return TRACKERS[variable](folder, name)
    except ImportError as error:
        extra = variable.partition("_")[0].lower()
        raise RuntimeError(
            f"{variable} is set, but {extra} is not installed: pip install 'rlhf-pipeline[{extra}]', or unset it"
        ) from error
    except Exception as error:
        print(f"no metrics of this stage go to {variable}: {error!r}", flush=True)
        return None

"""Logs of a running stage's metrics: JSON lines, TensorBoard, and Weights & Biases if WANDB_PROJECT is set."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


class Metrics:
    """One row after the other, under `logs/` of the artifact (logs are no content).

    `metrics.jsonl` has every value, `tensorboard/` the numbers, with the count of rows as the step. With
    WANDB_PROJECT set (extra `wandb`) the numbers also go to a run of that project.
    """

    def __init__(self, folder: Path, name: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = (folder / "metrics.jsonl").open("a")
        self._board = _summary_writer()(str(folder / "tensorboard"), filename_suffix=f".{name}", write_to_disk=True)
        self._wandb = _wandb_run(folder, name) if os.environ.get("WANDB_PROJECT") else None
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
        if self._wandb is not None:
            self._wandb.log(numbers, step=self._rows)
        self._rows += 1

    def close(self) -> None:
        """Closes all logs."""
        self._lines.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


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


def _wandb_run(folder: Path, name: str) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise RuntimeError(
            "WANDB_PROJECT is set, but wandb is not installed: pip install 'rlhf-pipeline[wandb]', or unset it"
        ) from error
    # create_new: a worker runs several stages in one process, each with a run of its own.
    return wandb.init(project=os.environ["WANDB_PROJECT"], name=name, dir=str(folder), reinit="create_new")

"""A request for a stage without inputs, a listener that hears nothing, and programs in place of the worker's."""

from pathlib import Path
from typing import Any

import pytest

from rlhf.stages.worker import interpreter
from rlhf.stages.worker.protocol import Report, Request


def request(store: Path, name: str = "base", **config: Any) -> Request:
    """What a session sends for a stage without inputs."""
    settings = {"source": "random:tiny"} | config
    return Request(name, "k" * 64, {}, settings, {}, seed=7, store=str(store), run="test")


def ignore(event: Report) -> None:
    pass


def workers_are(patch: pytest.MonkeyPatch, name: str) -> None:
    """Processes of workers run the program of this name here."""
    real = interpreter.command
    patch.setattr(interpreter, "command", lambda _, *arguments: real(f"tests.stages.worker.{name}", *arguments))
